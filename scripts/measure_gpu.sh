#!/usr/bin/env bash
# symmcomm and its peers on GPUs, side by side in every run; JSON goes to $OUT, or scripts/results/. In the environment that is
# active (extra `cuda`). NVLink multicast is forbidden, whatever the caller has set. Arguments, such as `--rounds 5` or
# `--share-gpu --nproc 2`, go to every run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SYMMCOMM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
more=("$@")

measure() { # arguments of `symmcomm bench`
    echo "== symmcomm bench $*"
    python -m symmcomm bench "$@" --device cuda -d bfloat16 --json "${OUT:-scripts/results}/gpu_$1.json" "${more[@]}"
}

measure all_reduce -b 1K -e 512M -f 2 --peers nccl,nccl_symm,torch_symm_mem
measure reduce_scatter -b 8K -e 512M -f 4 --peers nccl,nccl_symm,symm_ring
measure all_gather -b 8K -e 512M -f 4 --peers nccl,nccl_symm
measure all_to_all -b 448K -e 112M -f 4 --peers nccl,nccl_symm
measure barrier --peers nccl
