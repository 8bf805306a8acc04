#!/usr/bin/env bash
# Runs every fuzz target of the module for the given time each and fails when one
# finds something. Targets are found by their names: there is no list to keep.
# usage: fuzz.sh TIME [WORKERS]     (TIME as of go test -fuzztime; WORKERS per target, default: all processors)
#
# Only this module's packages are instrumented: the inputs that count are those
# that reach new code of ours, and the libraries need not be compiled again.
set -euo pipefail
cd "$(dirname "$0")/../.."

time=$1 workers=${2:-$(nproc)}
module=$(go list -m)
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
touch "$bin/begin"

# What was interesting is kept where go test -fuzz keeps it.
corpus=$(go env GOCACHE)/fuzz
targets=0 failed=()

# timed_out LOG TARGET: the time ended while an input was under way, which Go before
# 1.27 takes for a failure (go.dev/issue/75804). A real one names its input or seed.
timed_out() {
  [ "$(grep -v '^fuzz: ' "$1" | sed 's/ ([0-9.]*s)$//')" = "--- FAIL: $2"$'\n''    context deadline exceeded'$'\n''FAIL' ]
}

# one PACKAGE BINARY TARGET
one() {
  local directory=$1 binary=$2 target=$3 log=$bin/log
  if (cd "$directory" && "$binary" -test.run '^$' -test.fuzz "^$target\$" -test.fuzztime "$time" \
    -test.parallel "$workers" -test.fuzzminimizetime 10s -test.fuzzcachedir "$corpus/$module/$directory") > "$log" 2>&1 || timed_out "$log" "$target"; then
    printf 'ok    %-24s %-40s %s\n' "$target" "$directory" "$(grep -o 'execs: [0-9]*' "$log" | tail -n 1)"
    return
  fi
  printf 'FAIL  %-24s %s\n' "$target" "$directory"
  sed 's/^/      /' "$log"
  failed+=("$directory $target")
}

for directory in $(grep -rl --include='*_test.go' '^func Fuzz' api plugins registrar scripts | xargs -n 1 dirname | sort -u); do
  go test -c -gcflags="$module/...=-d=libfuzzer" -o "$bin/fuzz.test" "./$directory"
  for target in $("$bin/fuzz.test" -test.list '^Fuzz'); do
    targets=$((targets + 1))
    one "$directory" "$bin/fuzz.test" "$target"
  done
done

echo "$targets fuzz targets, $time each, ${#failed[@]} failed"
[ "$targets" -gt 0 ] || exit 1
[ ${#failed[@]} -gt 0 ] || exit 0
echo 'The inputs are in the folders testdata/fuzz of the packages. Again with one of them, or with all that are there:'
for f in "${failed[@]}"; do
  read -r directory target <<< "$f"
  echo "  go test -count 1 -run '^$target\$' ./$directory"
  find "$directory/testdata/fuzz/$target" -type f -newer "$bin/begin" -printf "  go test -count 1 -run '^$target\$/^%f\$' ./$directory    # %p\n" 2> /dev/null || true
done
exit 1
