"""Run by torchrun and mpirun: two bootstraps, a few gathers, one line a rank. argv: seconds, mute ranks."""

from __future__ import annotations

import sys
import time

from symmcomm.bootstrap import connect
from symmcomm.env import Launch
from symmcomm.errors import SymmCommError


def main(timeout_s: float, mute: set[int]) -> None:
    first = connect(None, timeout_s)
    second = connect(None, timeout_s)
    if first.rank in mute:
        time.sleep(timeout_s + 2)
        return
    big = bytes([65 + first.rank]) * (first.rank * (3 << 20))
    for bootstrap in (second, first, second):
        parts = bootstrap.all_gather(b"%d" % first.rank, timeout_s)
        assert parts == [b"%d" % rank for rank in range(first.world_size)]
    assert [len(part) for part in first.all_gather(big, timeout_s)] == [r * (3 << 20) for r in range(first.world_size)]
    print(f"rank {first.rank} of {first.world_size}: {first.name}", flush=True)
    first.close()
    second.close()


if __name__ == "__main__":
    try:
        main(float(sys.argv[1]), {int(rank) for rank in sys.argv[2:]})
    except SymmCommError as error:
        print(f"{type(error).__name__} {Launch.from_env().mpi}: {error}", flush=True)
