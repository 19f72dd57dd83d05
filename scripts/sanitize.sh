#!/usr/bin/env bash
# compute-sanitizer over the local worlds, on one GPU, in the environment that is active (extras `cuda` and `test`): memcheck,
# for which every tensor has an allocation of its own, so that a byte beyond it is found; and racecheck, for shared memory.
# Multicast is forbidden, whatever the caller has set. Reports go to files in $OUT, or in a new folder; the last lines say what was
# found. Fails if a test does, or if a tool finds anything or watched no process. Arguments go to pytest; `SECONDS_EACH` ends a tool.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SYMMCOMM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export OMP_NUM_THREADS=1
logs=${OUT:-$(mktemp -d)} status=0 lines=()
if (($#)); then tests=("$@"); else tests=(tests/gpu/test_local_*.py); fi
workers=()
if python -c 'import xdist' 2>/dev/null; then workers=(-n "$(env -u OMP_NUM_THREADS nproc)" --dist worksteal); fi

check() { # a tool, what its summary counts, and environment variables
    local tool=$1 counts=$2 code=0 begin=$SECONDS
    shift 2
    mkdir -p "$logs/$tool"
    timeout --signal INT --kill-after 20 "${SECONDS_EACH:-1800}" env --default-signal=INT "$@" \
        compute-sanitizer --tool "$tool" --target-processes all --report-api-errors no --log-file "$logs/$tool/%p.txt" \
        python -m pytest -v --durations 10 -m "gpu and not multicast" ${workers[@]+"${workers[@]}"} "${tests[@]}" \
        >"$logs/$tool.log" 2>&1 || code=$?
    local watched found
    watched=$({ grep -lE "$counts" "$logs/$tool"/*.txt 2>/dev/null || true; } | wc -l)
    found=$({ grep -hE "$counts" "$logs/$tool"/*.txt 2>/dev/null || true; } | grep -cvE "$counts: 0 " || true)
    ((code == 0 && watched > 0 && found == 0)) || status=1
    lines+=("$tool: exit status $code, $(tail -n 1 "$logs/$tool.log")")
    lines+=("    of $watched processes that it watched, $found had errors; $((SECONDS - begin)) s")
}

check memcheck "ERROR SUMMARY" PYTORCH_NO_CUDA_MEMORY_CACHING=1
check racecheck "RACECHECK SUMMARY"
printf '%s\n' "${lines[@]}" "more in $logs"
exit "$status"
