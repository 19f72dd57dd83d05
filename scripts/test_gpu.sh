#!/usr/bin/env bash
# Every test that needs a GPU, in the environment that is active (CuTe DSL must be installed: extra `cuda`). NVLink multicast is
# forbidden, whatever the caller has set. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SYMMCOMM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
exec python -m pytest -m "gpu and not multicast and not nvshmem" "$@"
