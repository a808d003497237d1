"""Which tests a commit or a nightly shard runs."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.rotation import TURNS, Share, in_turn, nightly

SHARES, SHARDS = 48, 8


@dataclass
class Item:
    nodeid: str
    marks: tuple[Any, ...]

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [each.mark for each in self.marks if each.mark.name == name]


ITEMS = [
    Item(f"tests/{file}.py::test[{number}]", marks)
    for marks in ((), (pytest.mark.nightly,), (in_turn,), (in_turn, pytest.mark.nightly))
    for file in "abcdefgh"
    for number in range(5)
]


def taken(text: str) -> list[Item]:
    share = Share(text)
    return [item for item in ITEMS if share.has(item)]


def test_every_commit_takes_what_is_not_nightly_and_each_nightly_test_has_its_turn() -> None:
    commits = [taken(f"{commit}/{SHARES}") for commit in range(700, 700 + SHARES)]
    for item in ITEMS:
        turns = sum(item in one for one in commits)
        assert turns == (SHARES if not item.marks else SHARES // TURNS if item.marks == (in_turn,) else 1)


def test_tests_in_turn_of_a_file_go_together() -> None:
    for commit in range(TURNS):
        found = [item for item in taken(f"{commit}/{SHARES}") if item.marks == (in_turn,)]
        assert len(found) % 5 == 0


def test_shards_have_each_nightly_test_once() -> None:
    shards = [taken(f"{shard}/{SHARDS}") for shard in range(SHARDS)]
    assert all(sum(item in one for one in shards) == 1 for item in ITEMS if item.marks)
    assert taken("all") == ITEMS


def test_cells_are_nightly_but_for_those_that_are_named() -> None:
    def named() -> None: ...

    cells = nightly([None, "", 1, 2, ("a", 3), named], but=[None, "", 2, "a", "named"])
    assert [bool(cell.marks) for cell in cells] == [False, False, True, False, False, False]
