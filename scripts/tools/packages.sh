#!/usr/bin/env bash
# Installs the Debian packages of the commands that are missing; says nothing
# when none is. usage: packages.sh COMMAND...   (pip stands for python3 -m pip)
set -euo pipefail

has() {
  case $1 in
    pip) python3 -m pip --version || /usr/bin/python3 -m pip --version ;;
    gcc) command -v gcc && test -e /usr/include/stdlib.h ;; # the race detector needs cgo
    *) command -v "$1" || test -x "/usr/sbin/$1" ;;
  esac > /dev/null 2>&1
}
package() {
  case $1 in
    ip) echo iproute2 ;;
    nft) echo nftables ;;
    nsenter | unshare) echo util-linux ;;
    pip) echo python3-pip ;;
    gcc) echo gcc libc6-dev ;;
    sysctl) echo procps ;;
    *) echo "$1" ;; # curl, git, openssl, mount, runc
  esac
}

missing=()
for command in "$@"; do
  has "$command" || missing+=($(package "$command"))
done
[ ${#missing[@]} -gt 0 ] || exit 0
if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then
  echo "packages.sh: install these packages first: ${missing[*]} (with apt-get and as root this script does it)" >&2
  exit 1
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
