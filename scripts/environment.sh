# Sourced by the other scripts: a virtual environment in .venv with symmcomm, its extras in $1, and both MPIs where they can be had.
#
#   PYTHON=python3.12 scripts/test.sh     another interpreter
#   SYMMCOMM_TORCH=torch==2.11.0          another torch than the one known to work
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=$1

if [ ! -x .venv/bin/python ]; then
    "${PYTHON:-python3}" -m venv .venv
fi
# shellcheck disable=SC1091
. .venv/bin/activate

if ! python -c 'import torch' 2>/dev/null; then
    torch=${SYMMCOMM_TORCH:-torch==2.13.0}
    # Without a GPU the CPU build is enough and a tenth of the size. Where the index has no build of that name, take what it has.
    if [ -e /proc/driver/nvidia/version ] || ! python -m pip install -q "$torch+cpu" 2>/dev/null; then
        python -m pip install -q "$torch"
    fi
fi

stamp=.venv/symmcomm-$extras
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    python -m pip install -q -e ".[$extras]"
    touch "$stamp"
fi

# MPICH installs files of the same names as Open MPI, so it gets a prefix of its own. Optional: the benchmark and the tests use it if it is there.
if [[ ,$extras, == *,test,* ]] && [ ! -x .venv/mpich/bin/mpiexec ]; then
    python -m pip install -q --prefix "$PWD/.venv/mpich" mpich || echo "MPICH could not be installed; going on without" >&2
fi
