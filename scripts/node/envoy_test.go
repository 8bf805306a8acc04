package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// An Envoy is taken from version 1.40 on; an older one, or what is no Envoy, is
// refused by a message that says so (dataplane decision 1).
func TestCheckEnvoy(t *testing.T) {
	tests := []struct {
		name    string
		script  string
		wantErr string
	}{
		{name: "oldest", script: "echo; echo 'envoy  version: 9e55/1.40.0/Clean/RELEASE/BoringSSL'"},
		{name: "newer minor", script: "echo 'envoy  version: 9e55/1.41.2-dev/Clean/RELEASE/BoringSSL'"},
		{name: "newer major", script: "echo 'envoy  version: 9e55/2.0.0/Clean/RELEASE/BoringSSL'"},
		{name: "older", script: "echo 'envoy  version: 9e55/1.38.3/Clean/RELEASE/BoringSSL'", wantErr: "is Envoy 1.38: use 1.40 or later"},
		{name: "no Envoy", script: "echo hello", wantErr: `is no Envoy: --version printed "hello"`},
		{name: "fails", script: "echo broken >&2; exit 1", wantErr: "exit status 1: broken"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "envoy")
			if err := os.WriteFile(path, []byte("#!/bin/sh\n"+tt.script+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			err := checkEnvoy(t.Context(), path)
			if tt.wantErr == "" && err != nil || tt.wantErr != "" && (err == nil || !strings.Contains(err.Error(), tt.wantErr)) {
				t.Errorf("checkEnvoy = %v, want %q", err, tt.wantErr)
			}
		})
	}
}
