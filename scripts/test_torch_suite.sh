#!/usr/bin/env bash
# torch's own tests of c10d, on gloo, and on symm under its own name and under gloo's (scripts/torch_suite.py). Fails if a
# test of symm fails, or if one that passes on gloo is skipped under gloo's name. Some 6 minutes; not part of CI.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test,dev,suite
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

run() { # backend, then options
    echo "== $1"
    if python -W ignore scripts/torch_suite.py "$@" --json "$out/$1.json" >"$out/$1.txt" 2>&1; then status=0; else status=$?; fi
    sed -n "/^$1: /,\$p" "$out/$1.txt"
    return "$status"
}

run gloo
run symm
run symm-as-gloo --against "$out/gloo.json"
