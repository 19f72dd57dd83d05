"""Tables of thresholds, and what follows from measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from symmcomm.errors import ArgumentError
from symmcomm.schedule.select import NEVER
from symmcomm.schedule.select_gpu import DEFAULT, Thresholds
from symmcomm.schedule.tuning_gpu import World, first_win, last_win, lookup, updated

HERE = World(gpu="A", world_size=2, num_sms=132)
THERE = World(gpu="A", world_size=4, num_sms=132)
SIZES = (1, 2, 4, 8)


def test_a_table_keeps_what_it_knows() -> None:
    mine, theirs = replace(DEFAULT, ll_bytes=7), Thresholds(gather_push_bytes=9)
    text = updated(updated("", HERE, mine), THERE, theirs)
    assert lookup(text, HERE) == mine
    assert lookup(text, THERE) == theirs
    assert lookup(updated(text, HERE, theirs), HERE) == theirs
    assert lookup(text, World(gpu="B", world_size=2, num_sms=132)) == DEFAULT
    assert lookup("", HERE) == DEFAULT


def test_thresholds_of_another_version_are_passed_over() -> None:
    text = updated("", HERE, replace(DEFAULT, ll_bytes=7)).replace('"gather_push_bytes"', '"gone_bytes"')
    assert lookup(text, HERE) == replace(DEFAULT, ll_bytes=7)


def test_a_table_from_before_the_switch_does_not_turn_it_on() -> None:
    text = updated("", HERE, replace(DEFAULT, ll_bytes=7)).replace(f',\n   "multimem_bytes": {NEVER}', "")
    assert "multimem_bytes" not in text
    assert lookup(text, HERE) == replace(DEFAULT, ll_bytes=7)
    assert DEFAULT.multimem_bytes == NEVER


WRONG = updated("", HERE, DEFAULT).replace("2", '"x"')


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', '[{"gpu": "A"}]', WRONG])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="not a table of thresholds"):
        lookup(text, HERE)


@pytest.mark.parametrize(
    ("first", "second", "last", "start"),
    [
        ((1, 1, 1, 1), (2, 2, 2, 2), 1 << 62, 1),
        ((3, 3, 3, 3), (2, 2, 2, 2), 0, 1 << 62),
        ((1, 1, 3, 3), (2, 2, 2, 2), 2, 1 << 62),
        ((1, 3, 1, 3), (2, 2, 2, 2), 4, 1 << 62),
        ((1, 3, 3, 1), (2, 2, 2, 2), 1, 8),
        ((3, 3, 2, 2), (2, 2, 2, 2), 0, 4),
    ],
)
def test_where_curves_cross(first: tuple[int, ...], second: tuple[int, ...], last: int, start: int) -> None:
    assert last_win(SIZES, first, second) == last
    assert first_win(SIZES, first, second) == start
