#!/usr/bin/env bash
# The figures of the README for GPUs, symmcomm and its peers side by side in every run; a few minutes on two GPUs.
# JSON goes to $OUT, or scripts/results/, under the name of the machine. In the environment that is active (extra `cuda`; `nvshmem`
# for that peer). NVLink multicast is forbidden, whatever the caller has set. Arguments go to every `symmcomm bench`: with one GPU,
# `--share-gpu --nproc 2`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SYMMCOMM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export NVSHMEM_SYMMETRIC_SIZE=${NVSHMEM_SYMMETRIC_SIZE:-2G} # for input and output of the largest call
export OUT=${OUT:-scripts/results} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
more=("$@") peers=nccl,nccl_symm
if python -c 'import nvshmem.core' 2>/dev/null; then peers+=,nvshmem; fi
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
gpu=$(python -c 'import torch; print(torch.cuda.get_device_name().removeprefix("NVIDIA ").replace(" ", "_"))')
if ((gpus < 2)); then export SYMMCOMM_SHARE_GPU=1; fi

status=0
run() { # a command; what it measured counts, also where another fails
    echo "== $*"
    local begin=$SECONDS
    "$@" || status=$?
    echo "== $((SECONDS - begin)) s"
}
measure() { # arguments of `symmcomm bench`
    run python -m symmcomm bench "$@" --device cuda -d bfloat16 --json "$OUT/gpu_$1_${gpus}x$gpu.json" "${more[@]}"
}

measure all_reduce -b 1K -e 512M -f 2 --peers "$peers,torch_symm_mem"
measure reduce_scatter -b 8K -e 512M -f 4 --peers "$peers,symm_ring"
measure all_gather -b 8K -e 512M -f 4 --peers "$peers"
measure all_to_all -b 448K -e 112M -f 2 --peers "$peers"
measure barrier --peers "$peers"
run python scripts/measure_call.py --device cuda --json "$OUT/gpu_call_${gpus}x$gpu.json"
run python scripts/measure_compile.py --json "$OUT/gpu_compile_$gpu.json"
if ((gpus < 2)); then
    run python scripts/gpu_norm.py --rounds 7 --world-size 1
else
    run python scripts/gpu_norm.py --rounds 7 --parts fused,pdl,rows,qk
fi
if [[ -f $OUT/gpu_norm.json ]]; then mv "$OUT/gpu_norm.json" "$OUT/gpu_norm_${gpus}x$gpu.json"; fi
echo "== $SECONDS s in all, exit status $status"
exit $status
