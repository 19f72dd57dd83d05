#!/usr/bin/env bash
# Before each commit: style, types, sizes, and the tests of the pure layers.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test,dev,cuda
ruff check .
mypy
python scripts/check_sizes.py
python -m pytest -q tests/schedule tests/memory/test_allocator.py
