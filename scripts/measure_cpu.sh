#!/usr/bin/env bash
# The figures of the README: every run measures symmcomm and its peers side by side, and leaves its JSON in scripts/results/.
# Takes 10 minutes and wants an idle machine.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test,dev
out=scripts/results
mkdir -p "$out"

measure() { # name, then arguments of `symmcomm bench`
    name=$1
    shift
    echo "== $name: symmcomm bench $*"
    symmcomm bench "$@" --device cpu --json "$out/cpu_$name.json"
}

measure all_reduce_2 all_reduce --nproc 2 -b 1K -e 64M -f 4 --peers gloo,mpi --rounds 9 --plot "$out/cpu_all_reduce_2.png"
measure all_reduce_2_bfloat16 all_reduce --nproc 2 -b 1K -e 64M -f 4 -d bfloat16 --peers gloo --rounds 9
for ranks in 4 8; do
    measure "all_reduce_$ranks" all_reduce --nproc "$ranks" -b 1K -e 1M -f 32 --peers gloo,mpi
done
for collective in reduce_scatter all_gather all_to_all broadcast; do
    measure "${collective}_2" "$collective" --nproc 2 -b 16K -e 64M -f 4 --peers mpi
done
