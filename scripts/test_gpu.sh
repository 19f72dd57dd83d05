#!/usr/bin/env bash
# Every test that needs a GPU, in the environment that is active (extras `cuda` and `test`): within 8 minutes on two H200s with 32
# cores, also on one GPU. Where pytest-xdist is missing tests run one by one. NVLink multicast is forbidden, whatever the caller has
# set. With arguments, all of them go to one pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SYMMCOMM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
unset PYTHONDONTWRITEBYTECODE # Numba's cache lies beside the sources
export OMP_NUM_THREADS=1      # for each of the many processes that share the cores: what tests compare with is computed by torch there
tests=(python -m pytest --durations 8) marked="gpu and not multicast and not nvshmem"
if (($#)); then
    exec "${tests[@]}" -m "$marked" "$@"
fi

python -c 'import symmcomm.testing.preload' & # compiles what tests with several processes need, beside those that need none of it
preload=$!
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # which would print those
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}"

between() { # least, most, and a number that is brought between them
    echo $(($3 < $1 ? $1 : $3 > $2 ? $2 : $3))
}
one_process=() processes=()
if python -c 'import xdist' 2>/dev/null; then
    workers=$(between 1 12 $((cores * 3 / 4 / (gpus > 0 ? gpus : 1)))) # they compile most of the time
    for device in "${devices[@]:-}"; do one_process+=(--tx "$workers*popen//env:CUDA_VISIBLE_DEVICES=$device"); done
    one_process+=(--dist worksteal)
    processes=(-n "$(between 1 4 $((cores / 8)))" --dist worksteal) # each test has 2 to 8
fi

status=0 lines=()
phase() { # name, then a command
    local name=$1 begin=$SECONDS code=0
    shift
    "$@" || code=$?
    lines+=("$(printf '%4d s, exit status %d: %s' $((SECONDS - begin)) $code "$name")")
    status=$((status ? status : code))
}

phase "ranks in one process" "${tests[@]}" -m "$marked" "${one_process[@]}" tests/gpu/test_local_*.py
phase "waited for Numba" wait $preload
phase "ranks in processes" "${tests[@]}" -m "$marked and not alone" "${processes[@]}" --ignore-glob='*/tests/gpu/test_local_*.py'
phase "tests that want a GPU to themselves" "${tests[@]}" -m "$marked and alone" --ignore-glob='*/tests/gpu/test_local_*.py'
printf '%s\n' "${lines[@]}"
printf '%4d s in all, exit status %d\n' $SECONDS $status
exit $status
