#!/usr/bin/env bash
# Installs what is missing and runs every test that needs no GPU; kernels for GPUs are compiled without one. `--quick`, as the first
# argument, leaves out the long forms of soak and fuzz tests. With others, all of them go to one pytest.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test,dev,cuda
unset PYTHONDONTWRITEBYTECODE # Numba's cache lies beside the sources
marked="not gpu and not multicast and not nvshmem"
if [[ ${1-} == --quick ]]; then
    marked+=" and not slow"
    shift
fi
if (($#)); then
    exec python -m pytest -m "$marked" "$@"
fi

# To compile takes a core and no other process, so as many tests do that at once as there are cores; other tests are ranks that
# need all cores for themselves. What fails there does not keep the others from running.
status=0
python -m pytest -m "$marked" -n auto --maxprocesses 8 tests/gpu || status=$?
python -m pytest -m "$marked" --ignore tests/gpu || status=$?
exit "$status"
