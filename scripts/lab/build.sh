#!/usr/bin/env bash
# Builds the lab's programs and its two images into bin/lab. Each foreign program is a module of its own
# with pinned versions; what is built from it is kept in a cache that all checkouts share, under a name
# that changes with the module's files, the compiler and its flags. SPIRE is not of the lab, but of tests,
# and Istio's pilot of a benchmark.
# usage: build.sh [hyperkube|containerd|coredns|spire|pilot]...
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
bin=$root/bin/lab
cache=${XDG_CACHE_HOME:-$HOME/.cache}/portolan-lab
export CGO_ENABLED=0

home() { # PROGRAM: its module
  case $1 in spire | pilot) echo "$root/scripts/tools/$1" ;; *) echo "$here/$1" ;; esac
}
version() { # PROGRAM MODULE: the pinned version
  sed -n "s,^\(require \|\t\)$2 \(v[^ ]*\).*,\2,p" "$(home "$1")/go.mod"
}
ldflags() { # PROGRAM: the version that it shows, as its own releases do
  local v
  case $1 in
    hyperkube)
      v=$(version hyperkube k8s.io/kubernetes)
      local package=k8s.io/component-base/version minor=${v#v*.}
      echo "-X $package.gitVersion=$v -X $package.gitMajor=1 -X $package.gitMinor=${minor%%.*}"
      ;;
    spire) # its own packages take the version without the v
      v=$(version spire github.com/spiffe/spire)
      echo "-X github.com/spiffe/spire/pkg/common/version.gittag=${v#v}"
      ;;
    containerd) echo "-X github.com/containerd/containerd/v2/version.Version=$(version containerd github.com/containerd/containerd/v2)" ;;
  esac
}
target() { # PROGRAM: the packages to install
  case $1 in containerd | spire | pilot) echo tool ;; *) echo . ;; esac
}
key() { # PROGRAM FLAG...: what the result depends on
  local program=$1
  shift
  (
    cd "$(home "$program")"
    shopt -s nullglob
    { go env GOVERSION GOARCH && echo "$@" && sha256sum go.mod go.sum ./*.go; } | sha256sum | cut -c1-16
  )
}
compile() { # PROGRAM FOLDER FLAG...: FOLDER appears when all of it is there
  local program=$1 folder=$2
  shift 2
  echo "building $program (minutes, when Go's build cache is cold)"
  rm -rf "$folder.part"
  (cd "$(home "$program")" && GOBIN=$folder.part go install "$@" "$(target "$program")")
  mv "$folder.part" "$folder"
}
program() { # PROGRAM: in the cache, and linked into bin/lab
  case $1 in spire) local -x CGO_ENABLED=1 ;; esac # its server's SQLite is C
  local flags=(-trimpath -tags no_btrfs -ldflags "-s -w $(ldflags "$1")") folder file
  folder=$cache/$1-$(key "$1" "${flags[@]}")
  [ -d "$folder" ] || (
    flock 9 # another checkout may be building the same
    [ -d "$folder" ] || compile "$1" "$folder" "${flags[@]}"
  ) 9> "$cache/$1.lock"
  for file in "$folder"/*; do ln -sfn "$file" "$bin/${file##*/}"; done
}
images() { # the images of every lab: the test program, which is also the pause container, and CoreDNS
  (cd "$root" && go build -trimpath -ldflags '-s -w' -o "$bin/" ./scripts/lab/app ./scripts/lab/pack)
  "$bin/pack" -o "$bin/app.tar" -name registry.k8s.io/pause:3.10.1,docker.io/library/echo:dev "$bin/app"
  "$bin/pack" -o "$bin/coredns.tar" -name registry.k8s.io/coredns/coredns:lab "$bin/coredns"
}

mkdir -p "$bin" "$cache"
if [ $# -gt 0 ]; then
  for p in "$@"; do program "$p"; done
  exit
fi
for p in hyperkube containerd coredns; do program "$p"; done
images
