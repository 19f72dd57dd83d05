#!/usr/bin/env bash
# compute-sanitizer over the local worlds, on one GPU, in the environment that is active (extras `cuda` and `test`): memcheck,
# for which every tensor has an allocation of its own, so that a byte beyond it is found; and racecheck, for shared memory.
# Multicast is forbidden, whatever the caller has set. The tests are dealt out to as many processes as there are cores. Reports go
# to files in $OUT, or in a new folder; the last lines say what was found. Fails if a test does, or a tool finds anything or
# watched nothing. Arguments go to pytest. $SECONDS_EACH ends a tool that takes longer (default half an hour).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SYMMCOMM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
cores=$(nproc)
export OMP_NUM_THREADS=1
logs=${OUT:-$(mktemp -d)} status=0 lines=()
(($#)) || set -- tests/gpu/test_local_*.py
python -m pytest --collect-only -q -m "gpu and not multicast" "$@" | grep '^tests/.*::' >"$logs/tests.txt"
split --number "r/$cores" --numeric-suffixes --suffix-length 3 "$logs/tests.txt" "$logs/part."
find "$logs" -name 'part.*' -empty -delete

check() { # a tool, the words before the number of what it found, and environment variables
    local tool=$1 found=$2 begin=$SECONDS part passed errors watched
    shift 2
    mkdir -p "$logs/$tool"
    for part in "$logs"/part.*; do
        timeout --signal INT --kill-after 20 "${SECONDS_EACH:-1800}" env --default-signal=INT "$@" \
            compute-sanitizer --tool "$tool" --target-processes all --report-api-errors no \
            --log-file "$logs/$tool/${part##*.}.txt" \
            python -m pytest -v -p no:cacheprovider "@$part" >"$logs/$tool/${part##*.}.log" 2>&1 &
    done
    wait
    passed=$(cat "$logs/$tool"/*.log | grep -c ' PASSED' || true)
    watched=$(cat "$logs/$tool"/*.txt | grep -c "$found" || true)
    errors=$(cat "$logs/$tool"/*.txt | grep "$found" | grep -cv "$found: 0 " || true)
    lines+=("$tool: $passed of $(wc -l <"$logs/tests.txt") tests passed in $watched processes, of which $errors had errors; $((SECONDS - begin)) s")
    if ((errors || !watched)) || cat "$logs/$tool"/*.log | grep -E '^(FAILED|ERROR) |KeyboardInterrupt'; then status=1; fi
}

check memcheck "ERROR SUMMARY" PYTORCH_NO_CUDA_MEMORY_CACHING=1
check racecheck "RACECHECK SUMMARY"
printf '%s\n' "${lines[@]}" "more in $logs"
exit "$status"
