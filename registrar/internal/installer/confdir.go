package installer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
)

// confFile is one file that a runtime may load.
type confFile struct {
	name string
	text []byte
	mode fs.FileMode
	// list: it is a .conflist, else a single configuration.
	list bool
	// owned: it is a list of ours.
	owned bool
	// network and version are what the runtime calls it and speaks with it.
	network, version string
	// unusable says why our entry cannot be chained to it; nil when it can.
	unusable error
	// loopback: it has no network but the loopback's, which every runtime adds
	// itself; it stands for no primary plugin.
	loopback bool
}

// errDangling is a link whose target is missing.
var errDangling = errors.New("it is a symbolic link to nothing: remove it, or let its target be there")

// confExtensions are those that runtimes load.
func confExtensions() []string { return []string{".conf", ".conflist", ".json"} }

// isConf reports whether a runtime would load a file of this name.
func isConf(name string) bool { return slices.Contains(confExtensions(), filepath.Ext(name)) }

// scan reads the configuration folder in the order in which runtimes look at it.
// A file that vanished meanwhile is left out.
func scan(dir string) ([]confFile, error) {
	paths, err := libcni.ConfFiles(dir, confExtensions())
	if err != nil {
		return nil, err
	}
	slices.Sort(paths)
	out := make([]confFile, 0, len(paths))
	for _, path := range paths {
		f, err := readConf(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			f.unusable = err
		}
		out = append(out, f)
	}
	return out, nil
}

// readConf reads and judges one file.
func readConf(path string) (confFile, error) {
	f := confFile{name: filepath.Base(path), list: filepath.Ext(path) == ".conflist"}
	info, err := os.Lstat(path)
	if err != nil {
		return f, err
	}
	f.mode = info.Mode()
	f.text, err = os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && f.mode.Type() == fs.ModeSymlink {
		return f, errDangling // runtimes fail on it
	}
	if err != nil {
		return f, err
	}
	if f.list {
		f.unusable = f.judgeList()
	} else {
		f.unusable = f.judgeSingle()
	}
	return f, nil
}

// chained reports whether a runtime that loads the file calls our plugin.
func (f *confFile) chained() bool {
	if f.unusable != nil || !f.list {
		return false
	}
	l, err := parseList(f.text)
	return err == nil && l.chained()
}

// judgeList reads a list as runtimes do.
func (f *confFile) judgeList() error {
	l, err := libcni.NetworkConfFromBytes(f.text)
	if err != nil {
		return emptyFile(f.text, err)
	}
	f.owned, f.network, f.version = isOwned(f.text), l.Name, l.CNIVersion
	f.loopback = len(l.Plugins) > 0
	for _, p := range l.Plugins {
		f.loopback = f.loopback && p.Network.Type == "loopback"
	}
	if len(l.Plugins) == 0 {
		return errors.New("it has no plugins of its own, only a folder of them: ours cannot come after those")
	}
	var stated struct {
		CNIVersion string `json:"cniVersion"`
	}
	if err := json.Unmarshal(f.text, &stated); err != nil {
		return err
	}
	// Runtimes that know no cniVersions use cniVersion, others the highest they know.
	return errors.Join(supported(stated.CNIVersion, len(stated.CNIVersion) == 0 && l.CNIVersion != ""), supported(l.CNIVersion, false))
}

// judgeSingle reads a single configuration as runtimes do.
func (f *confFile) judgeSingle() error {
	c, err := libcni.NetworkPluginConfFromBytes(f.text)
	if err != nil {
		return emptyFile(f.text, err)
	}
	f.network, f.version, f.loopback = c.Network.Name, c.Network.CNIVersion, c.Network.Type == "loopback"
	switch {
	case c.Network.Type == PluginType:
		return errAlone
	case f.network == "":
		return errors.New("it has no name: give the network one")
	}
	return supported(f.version, false)
}

// emptyFile is err, in words that fit a file that somebody is still writing.
func emptyFile(text []byte, err error) error {
	if len(bytes.TrimSpace(text)) == 0 {
		return errors.New("it is empty: complete or remove it")
	}
	return err
}

// supported refuses a version that the plugin does not speak: every ADD and DEL of
// the node would fail with it.
func supported(version string, optional bool) error {
	versions := []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}
	if optional || slices.Contains(versions, version) {
		return nil
	}
	return fmt.Errorf("its cniVersion %q is none that the plugin speaks (%s): raise it", version, strings.Join(versions, ", "))
}
