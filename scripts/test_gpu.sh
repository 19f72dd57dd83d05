#!/usr/bin/env bash
# Every test that needs a GPU, in the environment that is active (extras `cuda` and `test`), on one GPU or two. Where pytest-xdist
# is missing tests run one by one. NVLink multicast is forbidden, whatever the caller has set. What pytest says goes to files in
# $OUT, or in a new folder. A part that is not over in time is ended, and the tests that ran then are named; the last lines say
# how each part ended, also after Ctrl-C. With arguments, all of them go to one pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SYMMCOMM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
unset PYTHONDONTWRITEBYTECODE # Numba's cache lies beside the sources
export SYMMCOMM_SPIN=0        # the many ranks that wait leave the cores to those that compile
export SYMMCOMM_PRELOAD=gpu   # see symmcomm/testing/preload.py
export OMP_NUM_THREADS=1      # many processes share the cores, and torch computes there what tests compare with
tests=(python -m pytest --durations 30 -v) marked="gpu and not multicast and not nvshmem"
if (($#)); then
    exec "${tests[@]}" -m "$marked" "$@"
fi

logs=${OUT:-$(mktemp -d)} status=0 running="" job="" preload="" lines=()
summary() { # whatever happened
    status=$((status ? status : $?))
    trap '' INT TERM
    printf '%s\n' ${lines[@]+"${lines[@]}"}
    printf '%4d s in all, exit status %d; more in %s\n' $SECONDS "$status" "$logs"
    kill -INT $job 2>/dev/null || true # after that, as the caller may not wait
    kill $preload 2>/dev/null || true
    wait
    exit "$status"
}
trap summary EXIT
trap 'status=130; lines+=("interrupted in: $running"); unfinished; exit' INT TERM

unfinished() { # the tests of the running part that have begun and not ended
    [[ $running ]] || return 0
    awk '/^tests\/.*::/ && !/ (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)/ { sub(/ *$/, ""); begun[$0] }
        /^\[gw[0-9]+\].* (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS) / { sub(/^.*(PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS) /, "")
            sub(/ *$/, ""); delete begun[$0] }
        END { for (name in begun) print "          ran: " name }' "$logs/$running.log" >"$logs/unfinished.txt"
    mapfile -t -O ${#lines[@]} lines <"$logs/unfinished.txt"
}

phase() { # name, seconds that it may take, and a command
    running=$1
    local limit=$2 begin=$SECONDS code=0 log="$logs/$1.log"
    shift 2
    echo "$running: $log"
    timeout --signal INT --kill-after 20 "$limit" env --default-signal=INT "$@" >"$log" 2>&1 &
    job=$! # not in the foreground: a trap would wait for it
    wait $job || code=$?
    tail -n 40 "$log"
    lines+=("$(printf '%4d s, exit status %d: %s' $((SECONDS - begin)) $code "$running")")
    if ((code == 124 || code == 137)); then unfinished; fi
    status=$((status ? status : code))
}

# Compiles what tests with several processes need, beside those that need none of it.
python -c 'import symmcomm.testing.preload' >"$logs/preload.log" 2>&1 &
preload=$!
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # which would print those
gpus=$({ nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null || true; } | wc -l) # sooner than torch's first import
IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus > 0 ? gpus - 1 : 0)))}"

between() { # least, most, and a number that is brought between them
    echo $(($3 < $1 ? $1 : $3 > $2 ? $2 : $3))
}
one_process=() processes=() patience=5 # times as long, one test after the other
if python -c 'import xdist' 2>/dev/null; then
    patience=1
    # They compile most of the time.
    for device in "${devices[@]}"; do
        one_process+=(--tx "$(between 1 12 $((cores * 3 / 4 / ${#devices[@]})))*popen//env:CUDA_VISIBLE_DEVICES=$device")
    done
    one_process+=(--dist worksteal)
    # Processes that share a GPU take turns of milliseconds on it: so few tests at once, and as many begin with each GPU.
    for ((worker = $(between 1 4 $((cores / 4))); worker; worker--)); do
        processes+=(--tx "popen//env:CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${devices[*]}")")
        devices=("${devices[@]:1}" "${devices[0]}")
    done
    processes+=(--dist load --maxschedchunk 1)
fi

mapfile -t others < <(printf '%s\n' tests/gpu/test_*.py | grep -v /test_local_)
phase one_process $((240 * patience)) "${tests[@]}" -m "$marked" ${one_process[@]+"${one_process[@]}"} tests/gpu/test_local_*.py
phase numba 120 tail --pid=$preload -f /dev/null # what fails there is seen in the next
phase processes $((300 * patience)) "${tests[@]}" -m "$marked and not alone" ${processes[@]+"${processes[@]}"} "${others[@]}"
phase alone $((120 * patience)) "${tests[@]}" -m "$marked and alone" "${others[@]}"
