"""Rows of tokens: read by --mode sft as they stand, and refused where they cannot be trained on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl import cli
from fusionrl.config.config import Config
from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import check_file, load_conversations
from fusionrl.data.row_checks import RowChecker
from fusionrl.rollout.sft_rollout import to_sft_sample

Rows = Callable[..., Path]
TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


def row(tokens: Any, mask: Any, **more: Any) -> dict[str, Any]:
    return {"tokens": tokens, "loss_mask": mask, **more}


def test_tokens_and_mask_are_trained_on_as_they_stand(write_rows: Rows, tiny_model: Path) -> None:
    data = write_rows([row([7, 8, 9, 10, 11], [0, 0, 1, 0, 1], prompt="p", metadata={"k": 1}), {"messages": TURNS}])
    columns = PromptColumns("messages")
    assert check_file(data, "--prompt-data", RowChecker(columns, is_sft=True, vocab_size=12)).errors == []
    args = Config.from_flat({"hf_checkpoint": str(tiny_model)}).to_args()
    first, second = (to_sft_sample(args, sample) for sample in load_conversations(data, columns).samples)
    assert (list(first.tokens), first.response_length) == ([7, 8, 9, 10, 11], 3)
    assert list(first.loss_mask) == [1, 0, 1] and first.metadata == {"k": 1}
    assert second.prompt == TURNS, "rows of both kinds may stand in one file"


@pytest.mark.parametrize(
    ("tokens", "mask", "said"),
    [
        ([1, 99], [0, 1], "an id that is not in the vocabulary (0..49) (99)"),
        ([1, 2, 3], [0, 1], "differ in length; give one value of the mask for each token (3 and 2)"),
        ([1, 2], [0, 2], "column 'loss_mask' holds another value than 0 and 1"),
        ([1, 2], [0, 0.5], "column 'loss_mask' is not a list of whole numbers"),
        ([1, 2], [0, 0], "column 'loss_mask' is 0 on every token"),
        ([1, 2], [1, 1], "column 'loss_mask' is 1 on the first token"),
        ([], [], "column 'tokens' is empty"),
        ("12", [0, 1], "column 'tokens' is not a list of whole numbers"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tokens: Any, mask: Any, said: str, write_rows: Rows) -> None:
    data = write_rows([row(tokens, mask, messages=TURNS)])
    columns = PromptColumns("messages")
    (error,) = check_file(data, "--prompt-data", RowChecker(columns, is_sft=True, vocab_size=50)).errors
    assert "line 1" in error and said in error


def test_one_of_the_columns_is_something_else(write_rows: Rows) -> None:
    columns = PromptColumns("q", "a")
    data = write_rows([{"q": "x", "a": "y", "tokens": 7}, {"q": "x", "a": "z", "loss_mask": [1], "tokens": None}])
    assert check_file(data, "--prompt-data", RowChecker(columns, is_sft=True)).errors == []
    assert [s.prompt for s in load_conversations(data, columns).samples] == ["x", "x"]
    plain = write_rows([{"q": "x", "a": "y", "tokens": 7, "loss_mask": 1}])
    assert check_file(plain, "--prompt-data", RowChecker(columns)).errors == [], "prompts of rl have no mask"


def test_data_check_reads_the_vocabulary_of_the_model(
    write_rows: Rows, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    data = write_rows([row([1, size - 1], [0, 1]), row([1, size - 1], [0, 1]), row([1, size], [0, 1])])
    flags = ["--mode", "sft", "--hf-checkpoint", str(tiny_model), "--input-key", "messages"]
    assert cli.main(["data", "check", str(data), *flags]) == 2
    out = capsys.readouterr().out
    assert f"line 3: column 'tokens' holds an id that is not in the vocabulary (0..{size - 1}) ({size})" in out
    assert "line 2: the same sample as an earlier row" in out
