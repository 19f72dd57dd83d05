#!/usr/bin/env bash
# Installs what is missing and runs every test that needs no GPU; kernels for GPUs are compiled without one. Arguments go to pytest.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test,dev,cuda
unset PYTHONDONTWRITEBYTECODE # Numba's cache lies beside the sources
exec python -m pytest -m "not gpu and not multicast and not nvshmem" "$@"
