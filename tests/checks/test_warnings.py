"""Settings that are allowed and probably not meant are warned about, before the run and in the plan."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.checks.data import chat_warnings
from fusionrl.checks.training import context_warnings
from fusionrl.checks.validate import flag_warnings, run_warnings
from fusionrl.cli.resolve import resolve
from fusionrl.config.config import Config
from fusionrl.config.pipeline import staleness_warnings
from fusionrl.plan.devices import GIB

Rows, Warnings = Callable[..., Path], Callable[..., list[str]]


@pytest.fixture
def warnings(tiny_model: Path, write_rows: Rows) -> Warnings:
    """warnings(prompt, field=value, …) of a run whose first prompt this is."""

    def find(prompt: Any, **changes: Any) -> list[str]:
        data = str(write_rows([{"input": prompt, "label": "2"}]))
        values = {"hf_checkpoint": str(tiny_model), "prompt_data": data} | changes
        return chat_warnings(Config.from_flat({name: value for name, value in values.items() if value is not None}))

    return find


def test_plain_text_for_a_tokenizer_with_a_template(warnings: Warnings) -> None:
    for mode in ("rl", "reject-sampling"):
        (text,) = warnings("What is 1+1?", mode=mode)
        assert text.startswith("--prompt-data: its prompts are plain text") and "--apply-chat-template" in text


def test_evaluations(warnings: Warnings, tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"input": "What is 1+1?"}))
    flags = {"mode": "eval", "prompt_data": None, "eval_prompt_data": ["held-out", str(path)]}
    (text,) = warnings("", **flags)
    assert text.startswith("evaluation set held-out: its prompts are plain text")
    assert warnings("", **flags, apply_chat_template=True) == []


def test_what_is_meant_that_way(warnings: Warnings, tiny_model: Path, tmp_path: Path) -> None:
    assert warnings("What is 1+1?", apply_chat_template=True) == []
    assert warnings("What is 1+1?", mode="sft") == [], "nothing is generated"
    assert warnings([{"role": "user", "content": "1+1?"}]) == [], "an error of its own"
    for flag in ("rollout_function_path", "custom_generate_function_path", "data_source_path"):
        assert warnings("What is 1+1?", **{flag: "mine.py:f"}) == [], "it may render prompts itself"
    for rendered in ("<|im_start|>user\n1+1?<|im_end|>\n", "<s>[INST] 1+1? [/INST]", "<｜User｜>1+1?<｜Assistant｜>"):
        assert warnings(rendered) == [], rendered
    assert len(warnings("is 1 < 2 or 2 <| 3 |> 1?")) == 1, "no mark of a turn"
    assert warnings("What is 1+1?", prompt_data=str(tmp_path / "none.jsonl")) == [], "an error of its own"
    assert warnings("What is 1+1?", hf_checkpoint=str(tiny_model / "config.json")) == [], "no tokenizer there"
    base = shutil.copytree(tiny_model, tmp_path / "base", ignore=shutil.ignore_patterns("chat_template.jinja"))
    assert warnings("What is 1+1?", hf_checkpoint=str(base)) == []


def test_special_tokens_of_the_tokenizer_are_marks(warnings: Warnings, tiny_model: Path, tmp_path: Path) -> None:
    own = shutil.copytree(tiny_model, tmp_path / "own")
    settings = json.loads((own / "tokenizer_config.json").read_text()) | {"additional_special_tokens": ["[USER]"]}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    found = [warnings(text, hf_checkpoint=str(own)) for text in ("[USER] 1+1?", "1+1?")]
    assert [*map(len, found), len(warnings("[USER] 1+1?"))] == [0, 1, 1]


@pytest.mark.parametrize(
    ("values", "is_told"),
    [
        ({"pipeline": "async"}, False),  # the loss corrects by default
        ({"pipeline": "async", "use_tis": False}, True),
        ({"pipeline": "stream", "use_tis": False}, True),
        ({"pipeline": "async", "rejection_level": "sequence"}, True),  # leaves out, and weighs nothing
        ({"pipeline": "stream", "update_weights_interval": 1}, False),
        ({"pipeline": "async", "use_rollout_logprobs": True}, False),
        ({"pipeline": "async", "use_tis": False, "mode": "sft"}, False),
        ({"pipeline": "async", "use_tis": False, "admission_lead": 9.0}, False),  # an error tells it
    ],
)
def test_where_tokens_of_older_weights_are_told(values: dict[str, Any], is_told: bool) -> None:
    found = staleness_warnings(Config.from_flat({"rollout_batch_size": 8, **values}))
    assert bool(found) == is_told and all("--use-tis" in text for text in found)


@pytest.mark.parametrize("field", ["custom_tis_function_path", "custom_pg_loss_reducer_function_path"])
def test_a_function_that_may_sum_over_context_ranks(field: str) -> None:
    values = {field: "mine.py:f", "context_parallel_size": 2}
    (told,) = (text for text in flag_warnings(Config.from_flat(values)) if "context ranks" in text)
    assert told.startswith(f"--{field.replace('_', '-')} mine.py:f: with --context-parallel-size 2")
    assert context_warnings(Config.from_flat({field: "mine.py:f"})) == []
    assert context_warnings(Config.from_flat({"context_parallel_size": 2})) == []
    assert context_warnings(Config.from_flat({**values, "mode": "sft"})) == []


@pytest.mark.parametrize(
    ("free", "flag", "disks"),
    [(1.0, "", "--run-dir TMPDIR"), (3.0, "", ""), (1.0, "--save-hf=x", "--run-dir --save-hf TMPDIR")],
)
def test_the_plan_warns_of_a_disk_with_little_room(
    free: float, flag: str, disks: str, tiny_model: Path, write_rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows([{"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]}])
    usage = shutil._ntuple_diskusage(100 * GIB, 99 * GIB, free * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    command = f"--mode sft --device cpu --hf-checkpoint {tiny_model} --num-rollout 1 --prompt-data {data}"
    command += f" --input-key messages --rollout-batch-size 1 --run-dir {data.parent / 'run'} {flag or '--no-save'}"
    texts = [text for text in run_warnings(*resolve(command.split())) if f"{free:.1f} GiB free" in text]
    assert sorted(text.split(" ")[0] for text in texts) == disks.split()
