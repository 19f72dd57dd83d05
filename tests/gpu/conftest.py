"""Before CUDA starts: local worlds of many ranks need a hardware queue for each stream (``testing.local_world``)."""

import os

import pytest

from symmcomm.env import ask_for_hardware_queues

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_users_own = _QUEUES in os.environ
ask_for_hardware_queues()


@pytest.fixture(autouse=True)
def _queues_for_local_worlds_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests start has contexts as usual: those with more queues are slow to make, and few fit on a GPU."""
    if not _users_own and not request.path.name.startswith("test_local_"):
        monkeypatch.delenv(_QUEUES)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests on GPUs first, so that none is left when all others have ended, and those of the most ranks first of
    them; each with another one behind it, as workers are given two tests at the start and then one after the other
    (``scripts/test_gpu.sh``)."""
    slow = [item for item in items[::-1] if item.get_closest_marker("gpu") and item.get_closest_marker("slow")]
    chosen = set(slow)
    others = iter([item for item in items if item not in chosen])
    items[:] = [each for item in slow for each in (item, next(others, None)) if each] + list(others)
