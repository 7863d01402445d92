"""Hundreds of ways to spoil prompt data: each is refused in one line, warned of, or the same data in another form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.data.mutations import (
    MODES,
    Judge,
    Mutation,
    Outcome,
    bytes_file,
    catalogue,
    good_rows,
    jsonl,
    run_all,
)


@pytest.fixture(scope="module")
def outcomes() -> Sequence[tuple[Mutation, Outcome]]:
    return list(run_all(catalogue()))


def test_no_mutation_passes_in_silence_or_ends_in_a_traceback(outcomes: Sequence[tuple[Mutation, Outcome]]) -> None:
    assert len({(one.kind, one.name) for one, _ in outcomes}) == len(outcomes) >= 200
    assert [f"{one.kind}: {one.name}: {fault}" for one, outcome in outcomes for fault in outcome.faults] == []


@pytest.mark.parametrize("mode", MODES)
def test_the_judge_finds_faults(tmp_path: Path, mode: str) -> None:
    """Good data is the same in each mode; a wrong expectation and a missing message are faults."""
    judge, good = Judge(tmp_path / "models"), bytes_file("data.jsonl", jsonl(good_rows(mode)))
    assert judge.judge(Mutation("none", "good", good, "same", mode=mode), tmp_path).faults == []
    assert judge.judge(Mutation("none", "good", good, "refused", mode=mode), tmp_path).faults
    assert judge.judge(Mutation("none", "good", good, "same", "a message", mode), tmp_path).faults
