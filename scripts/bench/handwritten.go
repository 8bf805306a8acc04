package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	_ "embed" // for the configuration
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"text/template"
	"time"

	"github.com/portolan-mesh/portolan/scripts/node"
)

// The ports in the client pod at which the hand-written Envoy takes requests, by
// the protocol that it speaks to the server pod.
const (
	handwrittenHTTP1 = 16001
	handwrittenHTTP2 = 16002
)

//go:embed testdata/handwritten.yaml
var handwrittenConfig string

// handwritten is an Envoy with a configuration that a person would write for one
// client pod and one server pod.
type handwritten struct{ cmd *exec.Cmd }

// startHandwritten starts it and waits until it answers.
func startHandwritten(ctx context.Context, r *rig, client, server *node.Pod) (*handwritten, error) {
	dir := filepath.Join(logDir, "handwritten")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make a folder: %w", err)
	}
	if err := writeCertificates(dir, "client", "server"); err != nil {
		return nil, err
	}
	tmpl, err := template.New("").Parse(handwrittenConfig)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	var text strings.Builder
	if err := tmpl.Execute(&text, map[string]any{
		"Dir": dir, "ClientNetns": client.Netns, "ServerNetns": server.Netns, "ServerIP": server.IP(),
		"Ports": map[string]int{"http_protocol_options": handwrittenHTTP1, "http2_protocol_options": handwrittenHTTP2},
	}); err != nil {
		return nil, fmt.Errorf("write the configuration: %w", err)
	}
	path := filepath.Join(dir, "envoy.yaml")
	if err := os.WriteFile(path, []byte(text.String()), 0o600); err != nil {
		return nil, fmt.Errorf("write the configuration: %w", err)
	}
	log, err := os.Create(filepath.Join(dir, "envoy.log"))
	if err != nil {
		return nil, fmt.Errorf("make a log: %w", err)
	}
	defer log.Close() // Envoy has its own descriptor
	// The same options as the node's Envoy.
	cmd := exec.Command(r.envoyPath(), "-c", path, "--concurrency", "2", "--disable-hot-restart") //nolint:noctx // lives until stop
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the hand-written Envoy: %w", err)
	}
	h := &handwritten{cmd: cmd}
	if err := h.await(ctx, client); err != nil {
		said, _ := os.ReadFile(log.Name())
		return nil, errors.Join(fmt.Errorf("the hand-written Envoy does not answer: %w; it said:\n%s", err, said), h.stop())
	}
	return h, nil
}

// await polls until both ports answer.
func (h *handwritten) await(ctx context.Context, client *node.Pod) error {
	ctx, cancel := context.WithTimeout(ctx, closeTime)
	defer cancel()
	for _, port := range []int{handwrittenHTTP1, handwrittenHTTP2} {
		args := []string{"--retry", "100", "--retry-delay", "1", "--retry-all-errors", "--fail", fmt.Sprintf("http://127.0.0.1:%d/", port)}
		if _, err := client.Curl(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

func (h *handwritten) stop() error {
	if err := h.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		return fmt.Errorf("end the hand-written Envoy: %w", err)
	}
	_ = h.cmd.Wait() // its error is the signal
	return nil
}

// writeCertificates makes a root and a certificate for each name, of the same kinds
// as the registrar's.
func writeCertificates(dir string, names ...string) error {
	rootKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make a key: %w", err)
	}
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "bench"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	rootDER, err := x509.CreateCertificate(rand.Reader, root, root, &rootKey.PublicKey, rootKey)
	if err != nil {
		return fmt.Errorf("make a root: %w", err)
	}
	if err := writePEM(filepath.Join(dir, "root.pem"), "CERTIFICATE", rootDER); err != nil {
		return err
	}
	for i, name := range names {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return fmt.Errorf("make a key: %w", err)
		}
		leaf := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i) + 2), NotAfter: root.NotAfter, KeyUsage: x509.KeyUsageDigitalSignature,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
			URIs:        []*url.URL{{Scheme: "spiffe", Host: "bench.test", Path: "/ns/default/sa/" + name}},
		}
		der, err := x509.CreateCertificate(rand.Reader, leaf, root, &key.PublicKey, rootKey)
		if err != nil {
			return fmt.Errorf("make a certificate: %w", err)
		}
		keyDER, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			return fmt.Errorf("encode a key: %w", err)
		}
		if err := errors.Join(writePEM(filepath.Join(dir, name+".pem"), "CERTIFICATE", der),
			writePEM(filepath.Join(dir, name+".key"), "PRIVATE KEY", keyDER)); err != nil {
			return err
		}
	}
	return nil
}

func writePEM(path, kind string, der []byte) error {
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}
