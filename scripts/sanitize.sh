#!/usr/bin/env bash
# compute-sanitizer over the local worlds, on one GPU, in the environment that is active (extras `cuda` and `test`): memcheck,
# for which every tensor has an allocation of its own, so that a byte beyond it is found; and racecheck, for shared memory, which
# only norms have. Multicast is forbidden, whatever the caller has set. The tests are dealt out to as many processes as there are
# cores and as a GPU has channels for. Reports go to files in $OUT, an empty folder, or in a new one; the last lines say what was
# found. Fails if a test or a process does, or if a tool finds anything. Arguments are files or names of tests (default:
# tests/gpu/test_local_*.py). $SECONDS_EACH ends a tool that takes longer (default half an hour).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SYMMCOMM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export OMP_NUM_THREADS=1
logs=${OUT:-$(mktemp -d)} status=0 lines=()
trap 'kill -INT $(jobs -p) 2>/dev/null || true; wait; exit 130' INT TERM

(($#)) || set -- tests/gpu/test_local_*.py
if ! python -m pytest --collect-only -q -m "gpu and not multicast" "$@" >"$logs/collected.txt" 2>&1; then
    cat "$logs/collected.txt"
    exit 1
fi
grep '^tests/.*::' "$logs/collected.txt" >"$logs/tests.txt"
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
processes=$((cores < 12 ? cores : 12)) # see ask_for_hardware_queues in symmcomm/env.py

check() { # a tool, the words before the number of what it found, what the names of its tests have, and environment variables
    local tool=$1 found=$2 names=$3 begin=$SECONDS failed=0 tests part report watched errors passed job jobs=()
    shift 3
    mkdir "$logs/$tool"
    tests="$logs/$tool/tests.txt"
    if ! grep "$names" "$logs/tests.txt" >"$tests"; then
        lines+=("$tool: none of these tests is for it")
        return
    fi
    split --number "r/$processes" --numeric-suffixes "$tests" "$logs/$tool/part."
    find "$logs/$tool" -name 'part.*' -empty -delete
    for part in "$logs/$tool"/part.*; do
        report="$logs/$tool/report.${part##*.}"
        timeout --signal INT --kill-after 20 "${SECONDS_EACH:-1800}" env --default-signal=INT "$@" \
            compute-sanitizer --tool "$tool" --target-processes all --report-api-errors no --log-file "$report.txt" \
            python -m pytest -v -p no:cacheprovider "@$part" >"$report.log" 2>&1 &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job" || failed=$((failed + 1)); done
    watched=$(cat "$logs/$tool"/report.*.txt | grep -c "$found" || true)
    errors=$(cat "$logs/$tool"/report.*.txt | grep "$found" | grep -cv "$found: 0 " || true)
    passed=$(cat "$logs/$tool"/*.log | grep -c ' PASSED' || true)
    grep -hE '^(FAILED|ERROR) ' "$logs/$tool"/*.log || true
    ((failed == 0 && errors == 0 && watched >= ${#jobs[@]})) || status=1
    lines+=("$tool: $passed of $(wc -l <"$tests") tests passed; of ${#jobs[@]} processes $failed failed,"
        "    $watched were watched to the end, $errors had errors; $((SECONDS - begin)) s")
}

check memcheck "ERROR SUMMARY" :: PYTORCH_NO_CUDA_MEMORY_CACHING=1
check racecheck "RACECHECK SUMMARY" /test_local_norm.py::
printf '%s\n' "${lines[@]}" "more in $logs"
exit "$status"
