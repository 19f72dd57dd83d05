#!/usr/bin/env bash
# From nothing to the all-reduce benchmark on this machine's ranks. Arguments go to `symmcomm bench all_reduce`.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" mpi,plot
symmcomm doctor
if [ $# -eq 0 ]; then
    set -- -b 1K -e 64M -f 4 --peers gloo,mpi
fi
exec symmcomm bench all_reduce "$@"
