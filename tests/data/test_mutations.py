"""Hundreds of ways to spoil prompt data: each is refused in one line, warned of, or the same data in another form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fusionrl.data.row_checks import PromptColumns, RowChecker
from fusionrl.data.strict_json import CleanRow, read_lines
from tests.data.mutations import (
    MODES,
    Judge,
    Mutation,
    Outcome,
    bytes_file,
    catalogue,
    good_rows,
    jsonl,
    row_mutations,
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


@pytest.mark.parametrize("mode", MODES)
def test_the_quick_look_at_a_row_never_differs_from_the_full_one(tmp_path: Path, mode: str) -> None:
    columns = PromptColumns("prompt", "label", tool_key="tools", apply_chat_template=mode in ("chat", "strict"))
    tokens = ("<|end|>", "<|assistant|>")
    quick, full = (RowChecker(columns, is_sft=mode == "sft", special_tokens=tokens) for _ in range(2))
    num_quick = 0
    for number, mutation in enumerate(row_mutations()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for _, row in read_lines(Path(mutation.write(folder))):
            if isinstance(row, dict):
                assert quick.findings(row) == full.findings(dict(row)), row
                num_quick += isinstance(row, CleanRow)
    assert num_quick > 500
