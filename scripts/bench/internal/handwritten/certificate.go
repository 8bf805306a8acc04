package handwritten

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"time"
)

// WriteCertificates makes a root and the certificates of client and server in a folder,
// of the same kinds as the registrar's.
func WriteCertificates(dir string) error {
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
	for i, name := range []string{"client", "server"} {
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
