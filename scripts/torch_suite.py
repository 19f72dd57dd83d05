"""Runs the tests of c10d that come with torch (``DistributedTest``) on a backend, 3 ranks, and counts the outcomes.

    python scripts/torch_suite.py symm --against gloo.json --json symm.json

``symm`` passes the tests' gates as what it is, a backend that torch does not know. As ``symm-as-gloo`` it also answers
to the names gloo and mpi, which opens tests that are kept for those, the all-to-all tests among them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import unittest

BACKENDS = ("gloo", "symm", "symm-as-gloo")


class _Alias(str):
    """The text ``symm`` that also equals ``gloo`` and ``mpi``, for gates such as ``BACKEND in {"gloo"}``."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash("gloo")

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other in ("gloo", "mpi")

    def __ne__(self, other: object) -> bool:
        return not self == other


def _prepare(backend: str) -> None:
    """What torch's module reads when it is imported."""
    name = backend.partition("-")[0]
    os.environ.update(BACKEND=name, WORLD_SIZE="3")
    os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="torch-suite-"))
    if name != "gloo":
        from torch.testing._internal.common_distributed import DistTestCases

        import symmcomm.testing.preload  # noqa: F401  # with compiled code, for the ranks to inherit

        for feature in ("plugin", "ddp", "subgroup"):
            DistTestCases.backend_feature[feature].add(name)
    if backend == "symm-as-gloo":
        decode = os.environ.decodevalue
        os.environ.decodevalue = lambda value: _Alias("symm") if value == b"symm" else decode(value)


_prepare(next((word for word in sys.argv[1:] if word in BACKENDS), "symm"))

import torch.multiprocessing  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All of them, each in 3 processes, forked from this one: to import everything anew would take most of the time."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class _Outcomes(unittest.TextTestResult):
    """Keeps how each test ended."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.outcomes: dict[str, str] = {}
        self.started = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self.started = time.monotonic()

    def _note(self, test: unittest.TestCase, outcome: str) -> None:
        self.outcomes[test.id().rpartition(".")[2]] = outcome
        print(f"  {time.monotonic() - self.started:.1f} s", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().addSuccess(test)
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        self._note(test, f"skipped: {reason}")

    def addFailure(self, test: unittest.TestCase, err: object) -> None:  # noqa: N802
        super().addFailure(test, err)  # type: ignore[arg-type]
        self._note(test, "failed")

    addError = addFailure  # noqa: N815


def _report(backend: str, outcomes: dict[str, str], against: dict[str, str]) -> bool:
    """Prints the counts; True if nothing failed, and nothing is missing that the other backend passes."""
    kinds = [outcome.partition(":")[0] for outcome in outcomes.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("passed", "skipped", "failed"))
    print(f"{backend}: {counts} of {len(kinds)}")
    failed = sorted(name for name, outcome in outcomes.items() if outcome == "failed")
    missing = sorted(
        name for name, outcome in against.items() if outcome == "passed" and outcomes.get(name, "passed") != "passed"
    )
    for name in failed:
        print(f"failed: {name}")
    for name in missing:
        print(f"passes on the other backend only: {name} ({outcomes[name]})")
    return not failed and not missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("--only", nargs="+", metavar="TEST", help="names, or beginnings of names")
    parser.add_argument("--json", help="file for the outcomes")
    parser.add_argument("--against", help="outcomes of another backend, to compare with")
    options = parser.parse_args()
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(Suite)
    chosen = [
        test for test in tests if not options.only or test.id().rpartition(".")[2].startswith(tuple(options.only))
    ]
    runner = unittest.TextTestRunner(sys.stdout, verbosity=2, resultclass=_Outcomes)
    result = runner.run(unittest.TestSuite(chosen))
    assert isinstance(result, _Outcomes)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result.outcomes, file, indent=1, sort_keys=True)
    against = {}
    if options.against:
        with open(options.against) as file:
            against = json.load(file)
    sys.exit(not _report(options.backend, result.outcomes, against))


if __name__ == "__main__":
    main()
