package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"runtime"
	"slices"
	"strings"
)

// The parts of the OCI image format 1.1 that containerd's import reads.

const mediaType = "application/vnd.oci.image."

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	Manifests     []descriptor `json:"manifests"`
}

type config struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
	Config       struct {
		Entrypoint []string
		Env        []string
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// blobs are the contents of an archive, by the digests' hexadecimal digits.
type blobs map[string][]byte

func (b blobs) add(kind string, data []byte) descriptor {
	sum := sha256.Sum256(data)
	digest := hex.EncodeToString(sum[:])
	b[digest] = data
	return descriptor{MediaType: mediaType + kind, Digest: "sha256:" + digest, Size: len(data)}
}

func (b blobs) addJSON(kind string, value any) (descriptor, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return descriptor{}, err
	}
	return b.add(kind, data), nil
}

// archiveOf is an OCI layout in a tar file: one image of one layer, with a name
// or more.
func archiveOf(layer []byte, entrypoint string, names []string) ([]byte, error) {
	contents := blobs{}
	layers := []descriptor{contents.add("layer.v1.tar", layer)}
	conf := config{Architecture: runtime.GOARCH, OS: runtime.GOOS}
	conf.Config.Entrypoint = []string{entrypoint}
	conf.Config.Env = []string{"PATH=" + binDir}
	conf.RootFS.Type = "layers"
	conf.RootFS.DiffIDs = []string{layers[0].Digest}
	confAt, err := contents.addJSON("config.v1+json", conf)
	if err != nil {
		return nil, err
	}
	image := manifest{SchemaVersion: 2, MediaType: mediaType + "manifest.v1+json", Config: confAt, Layers: layers}
	imageAt, err := contents.addJSON("manifest.v1+json", image)
	if err != nil {
		return nil, err
	}
	top := index{SchemaVersion: 2}
	for _, name := range names {
		imageAt.Annotations = map[string]string{
			"io.containerd.image.name":          name,
			"org.opencontainers.image.ref.name": name[strings.LastIndex(name, ":")+1:],
		}
		top.Manifests = append(top.Manifests, imageAt)
	}
	return layout(contents, top)
}

func layout(contents blobs, top index) ([]byte, error) {
	topJSON, err := json.Marshal(top)
	if err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	archive := tar.NewWriter(&buf)
	if err := add(archive, "oci-layout", 0o644, []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return nil, err
	}
	if err := add(archive, "index.json", 0o644, topJSON); err != nil {
		return nil, err
	}
	for _, digest := range slices.Sorted(maps.Keys(contents)) {
		if err := add(archive, "blobs/sha256/"+digest, 0o644, contents[digest]); err != nil {
			return nil, err
		}
	}
	if err := archive.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}
