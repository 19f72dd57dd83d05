"""Before CUDA starts: local worlds of many ranks need a hardware queue for each stream (``testing.local_world``)."""

import pytest

from symmcomm.env import ask_for_hardware_queues

ask_for_hardware_queues()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests on GPUs first, so that none is left when all others have ended, and those of the most ranks first of
    them; each with another one behind it, as workers are given two tests at the start and then one after the other
    (``scripts/test_gpu.sh``)."""
    slow = [item for item in items[::-1] if item.get_closest_marker("gpu") and item.get_closest_marker("slow")]
    chosen = set(slow)
    others = iter([item for item in items if item not in chosen])
    items[:] = [each for item in slow for each in (item, next(others, None)) if each] + list(others)
