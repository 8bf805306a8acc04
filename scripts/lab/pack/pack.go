// Command pack packs programs into an OCI image archive, which containerd
// imports, with neither an image builder nor a registry:
//
//	pack -o OUT -name NAME[,NAME...] FILE...
//
// The programs go to /usr/local/bin of the image, where the upstream images of
// Envoy have theirs; the first is the entry point. With a program that is linked
// dynamically go the loader and the libraries that this machine runs it with.
// The archive depends on the files alone: the same files give the same digests.
package main

import (
	"archive/tar"
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// binDir is where the programs are in the image.
const binDir = "/usr/local/bin"

func main() {
	out := flag.String("o", "", "the archive to write")
	names := flag.String("name", "", "the image's full names, with commas between them")
	flag.Parse()
	if err := run(*out, *names, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "pack:", err)
		os.Exit(1)
	}
}

func run(out, names string, programs []string) error {
	if out == "" || names == "" || len(programs) == 0 {
		return errors.New("want: pack -o OUT -name NAME[,NAME...] FILE")
	}
	files, err := content(programs)
	if err != nil {
		return err
	}
	layer, err := layerOf(files)
	if err != nil {
		return err
	}
	archive, err := archiveOf(layer, path.Join(binDir, filepath.Base(programs[0])), strings.Split(names, ","))
	if err != nil {
		return err
	}
	// A reader sees the old archive or the new one.
	part := out + ".part"
	if err := os.WriteFile(part, archive, 0o644); err != nil {
		return err
	}
	return os.Rename(part, out)
}

// content is what the image holds: from paths in the image to files here.
func content(programs []string) (map[string]string, error) {
	files := map[string]string{}
	for _, program := range programs {
		files[path.Join(binDir, filepath.Base(program))] = program
		libs, err := libraries(program)
		if err != nil {
			return nil, err
		}
		for _, lib := range libs {
			files[lib] = lib
		}
	}
	return files, nil
}

// libraries lists the loader and the shared libraries of a program, none for a
// static one, by asking the loader itself, as ldd does.
func libraries(program string) ([]string, error) {
	loader, err := interpreter(program)
	if loader == "" || err != nil {
		return nil, err
	}
	listed, err := exec.CommandContext(context.Background(), loader, "--list", program).Output()
	if err != nil {
		return nil, fmt.Errorf("list the libraries of %s: %w", program, err)
	}
	// Lines such as "libm.so.6 => /lib/libm.so.6 (0x7f...)" and "/lib64/ld.so (0x7f...)".
	libs := []string{loader}
	for field := range strings.FieldsSeq(string(listed)) {
		if filepath.IsAbs(field) {
			libs = append(libs, field)
		}
	}
	return libs, nil
}

// interpreter is the loader that a program names, "" for a static one.
func interpreter(program string) (string, error) {
	f, err := elf.Open(program)
	if err != nil {
		return "", fmt.Errorf("read %s as a program: %w", program, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			name, err := io.ReadAll(p.Open())
			return string(bytes.TrimRight(name, "\x00")), err
		}
	}
	return "", nil
}

// layerOf is the image's only layer: the files, the folders above them, /etc
// and /tmp.
func layerOf(files map[string]string) ([]byte, error) {
	modes := map[string]int64{"/etc": 0o755, "/tmp": 0o1777}
	for name := range files {
		for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
			modes[dir] = 0o755
		}
	}
	var buf bytes.Buffer
	layer := tar.NewWriter(&buf)
	for _, dir := range slices.Sorted(maps.Keys(modes)) {
		header := tar.Header{Typeflag: tar.TypeDir, Name: dir[1:] + "/", Mode: modes[dir]}
		if err := layer.WriteHeader(&header); err != nil {
			return nil, err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		data, err := os.ReadFile(files[name])
		if err != nil {
			return nil, err
		}
		if err := add(layer, name[1:], 0o755, data); err != nil {
			return nil, err
		}
	}
	if err := layer.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

func add(to *tar.Writer, name string, mode int64, data []byte) error {
	header := tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(data))}
	if err := to.WriteHeader(&header); err != nil {
		return fmt.Errorf("add %s: %w", name, err)
	}
	if _, err := to.Write(data); err != nil {
		return fmt.Errorf("add %s: %w", name, err)
	}
	return nil
}
