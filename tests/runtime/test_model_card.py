"""The model card beside --save-hf: what it says, what it keeps to itself, and that its command repeats the run."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.config.parser import read_args
from fusionrl.runtime.model_card import model_card, write_model_card

ARGV = [
    *("--mode", "rl", "--name", "sums", "--hf-checkpoint", "models/tiny", "--prompt-data", "sums.jsonl"),
    *("--label-key", "label", "--rm-type", "exact", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
    *("--rollout-max-response-len", "8", "--num-rollout", "3", "--lr", "0.001", "--apply-chat-template"),
    *("--eval-prompt-data", "held out", "eval set.jsonl", "--sglang-mem-fraction-static", "0.5"),
    *("--run-dir", "/home/someone/runs/7", "--no-offload-rollout"),
]
ROWS: list[dict[str, Any]] = [
    {"step": 0, "eval/held out/accuracy": 0.25},
    {"step": 1, "rollout/raw_reward": 0.1, "train/loss": -0.02, "rollout/accuracy": None},
    {"step": 2, "rollout/raw_reward": 0.5, "train/loss": -0.01},
    {"step": 3, "rollout/raw_reward": 0.4, "train/loss": 0.03, "eval/held out/accuracy": 0.75},
]
PLAN: Any = SimpleNamespace(layout=SimpleNamespace(world_size=2), device="cpu", precision="fp32", num_engines=1)


def card(*argv: str, has_curves: bool = True, **changes: str) -> str:
    """Of a run with these flags and changes of its plan."""
    config, errors = read_args([*ARGV, *argv])
    assert not errors
    plan: Any = SimpleNamespace(**vars(PLAN) | changes)
    return model_card("sums", config, plan, ROWS, has_curves=has_curves, has_base=False)


def command_of(text: str) -> list[str]:
    return shlex.split(text.partition("```\n")[2].partition("\n```")[0].replace("\\\n", " "))


def test_what_it_says() -> None:
    text = card()
    assert text.startswith('---\nbase_model: "models/tiny"\nlibrary_name: "transformers"\n')
    assert "`models/tiny` after 3 steps of reinforcement learning (grpo," in text
    assert "on 2 trainers (CPU process, fp32) and 1 engine." in text
    assert "| rollout/raw_reward | 0.1 | 0.4 | 0.5 |" in text and "rollout/accuracy" not in text
    assert "| 0 | 0.25 |\n| 3 | 0.75 |" in text and "* evaluation set held out: `eval set.jsonl`" in text
    assert "![curves of the run](curves.png)" in text and "curves.png" not in card(has_curves=False)
    assert "* torch 2." in text
    assert "on 2 trainers (GPU, bf16) and 1 engine." in card(device="cuda", precision="bf16")


def test_its_command_repeats_the_run() -> None:
    words = command_of(card())
    assert words[:2] == ["fusionrl", "train"]
    again, errors = read_args(words[2:])
    first, _ = read_args(ARGV)
    assert not errors and again.run.run_dir is None
    run = first.run.model_copy(update={"run_dir": None})
    assert again.to_args() == first.model_copy(update={"run": run}).to_args()
    assert again.passthrough == first.passthrough


def test_it_keeps_secrets_and_paths_to_itself() -> None:
    reward = ["--rm-type", "remote_rm", "--rm-url", "http://me:hunter2@host:80/score"]
    text = card("--sglang-ssl-keyfile-password", "abc123", *reward)
    assert "abc123" not in text and "--sglang-ssl-keyfile-password ***" in text
    assert "hunter2" not in text and "http://me:***@host:80/score" in text
    text = card("--rm-type", "remote_rm", "--rm-url", "https://host/score?api_key=hunter2&k=2")
    assert "hunter2" not in text and "https://host/score?api_key=***&k=2" in text
    assert "/home/someone" not in text, "the run's folder is not part of what it is"
    cached = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/0a1b2c"
    text = card("--hf-checkpoint", cached)
    assert 'base_model: "Qwen/Qwen3-0.6B"' in text and "/root" not in text


@pytest.mark.parametrize(("name", "title"), [("run", "sums-model"), ("sums-7", "sums-7")])
def test_its_title_is_the_model_s_name_and_the_base_models_card_is_kept(tmp_path: Path, name: str, title: str) -> None:
    """Not the default of --name: each card's title would be "run"."""
    folder = tmp_path / "sums-model"
    folder.mkdir()
    (folder / "README.md").write_text("the base model's")
    (tmp_path / "run.png").write_bytes(b"png")
    config, _ = read_args([*ARGV, "--name", name])
    write_model_card(folder, config, PLAN, ROWS, tmp_path / "run.png")
    assert (folder / "README.base.md").read_text() == "the base model's"
    assert (folder / "curves.png").read_bytes() == b"png"
    text = (folder / "README.md").read_text()
    assert "[README.base.md](README.base.md)" in text and f"\n# {title}\n" in text


@pytest.mark.parametrize("has_base", [False, True])
def test_a_run_that_died_after_the_card_writes_it_again(tmp_path: Path, has_base: bool) -> None:
    config, _ = read_args(ARGV)
    if has_base:
        (tmp_path / "README.md").write_text("the base model's")
    texts = []
    for _ in range(2):
        write_model_card(tmp_path, config, PLAN, ROWS, None)
        texts.append({file.name: file.read_text() for file in tmp_path.iterdir()})
    assert texts[0] == texts[1] and ("README.base.md" in texts[1]) == has_base
