"""Samples of supervised training in `fusionrl show` and `fusionrl view`: which tokens were trained on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl import cli
from fusionrl.buffer import sample_files
from fusionrl.observe.rollouts import list_rollouts

TURNS = [{"role": role, "content": text} for role, text in (("user", "1+1="), ("assistant", "2"))]
END = "<|im_end|>"


@pytest.fixture
def supervise(make_buffer: Any, write_rows: Callable[..., Path]) -> Callable[..., Path]:
    """supervise(rows, steps, attempt) -> the folder of a run of mode sft, a row a step."""

    def make(rows: list[dict[str, Any]], num_steps: int = 1, attempt: int = 1) -> Path:
        flags = {"mode": "sft", "prompt_data": str(write_rows(rows)), "input_key": "q", "label_key": "a"}
        buffer = make_buffer(attempt, **flags, rollout_batch_size=1, num_rollout=9)
        for rollout_id in range(num_steps):
            asyncio.run(buffer.generate(rollout_id))
        return Path(buffer.run_dir)

    return make


def printed(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert cli.main([*map(str, argv)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "num_trained", "trained_text"),
    [
        ({"q": "1+1=", "a": "2"}, "2 tokens", f"2{END}"),
        ({"q": TURNS, "a": ""}, "2 tokens", f"2{END}"),
        (
            {"q": [*TURNS, TURNS[0], TURNS[1] | {"content": "3"}], "a": ""},
            "28 tokens, 4 trained on",
            f"2{END}[-\n<|im_start|>user\n1+1={END}\n<|im_start|>assistant\n-]3{END}",
        ),
        ({"q": [TURNS[0], TURNS[1] | {"weight": 0}, TURNS[0], TURNS[1] | {"content": "3"}], "a": ""}, "2 tokens", "3"),
    ],
)
def test_the_trained_tokens_are_shown(supervise, row, num_trained, trained_text, tiny_model, capsys) -> None:
    run = supervise([row])
    text = printed(capsys, "show", run)
    assert f"  {num_trained}  completed" in text and "mean reward" not in text
    answer = trained_text.replace("[-", "").replace("-]", "").replace("\n", "\n           ")
    assert f"  answer   {answer}" in text
    assert trained_text in printed(capsys, "view", run, "--step", 1, "--sample", 0, "--tokenizer", tiny_model)
    printed(capsys, "view", run, "--tokenizer", tiny_model)
    assert (run / "view.html").stat().st_size > 0


def test_rows_of_tokens_are_shown_too(supervise: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tokenizer.encode("a:12", add_special_tokens=False)
    run = supervise([{"tokens": tokens, "loss_mask": [0, 0, 1, 0]}])
    (record,) = map(json.loads, printed(capsys, "show", run, "--json").splitlines())
    assert (record["prompt"], record["response"]) == ("a:", "12")
    assert (record["length"], record["num_trained"], record["reward"]) == (2, 1, None)


def test_samples_that_repeat_the_data_fill_no_disk(supervise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"q": f"{i}+1=", "a": str(i + 1)} for i in range(9)]
    run = supervise(rows, num_steps=1)
    size = list_rollouts(run)[0].path.stat().st_size
    monkeypatch.setattr(sample_files, "SFT_BYTES", int(2.5 * size))
    files = list_rollouts(supervise(rows, num_steps=5, attempt=2), all_attempts=True)
    assert [file.step for file in files] == [1, 1, 2]
