#!/usr/bin/env bash
# Every test that needs a GPU, in the environment that is active (CuTe DSL must be installed: extra `cuda`). With two GPUs, the
# tests that use one (tests/gpu/test_local_*) run on both at once, before the others. NVLink multicast is forbidden, whatever the
# caller has set. With arguments, all of them go to one pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SYMMCOMM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
tests=(python -m pytest -m "gpu and not multicast and not nvshmem")
if (($#)) || (($(python -c 'import torch; print(torch.cuda.device_count())') < 2)); then
    exec "${tests[@]}" "$@"
fi

first=() second=() ignored=() lead=0
for file in $(wc -c tests/gpu/test_local_*.py | grep -v total | sort -rn | awk '{print $2}'); do # long files take long
    size=$(wc -c <"$file")
    if ((lead <= 0)); then first+=("$file") lead=$((lead + size)); else second+=("$file") lead=$((lead - size)); fi
    ignored+=("--ignore=$file")
done
CUDA_VISIBLE_DEVICES=0 "${tests[@]}" "${first[@]}" &
one=$!
CUDA_VISIBLE_DEVICES=1 "${tests[@]}" "${second[@]}" &
two=$!
status=0
wait $one || status=$?
wait $two || status=$?
"${tests[@]}" "${ignored[@]}" || status=$?
exit $status
