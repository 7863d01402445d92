"""`fusionrl diff` names where two runs part, and what came first."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file

from fusionrl import cli
from fusionrl.config.config import Config
from fusionrl.config.resume_differences import as_written
from fusionrl.observe.metrics import MetricsSink
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.observe.run_dir import RunDir
from tests.own_process import run_code

VOCABULARY, LENGTH, STEPS, SAMPLES = 8, 4, 3, 4
Reward = Callable[[int, list[int]], float]


def share_of_sevens(_step: int, answer: list[int]) -> float:
    return answer.count(7) / LENGTH


def train(
    folder: Path, seed: int = 0, lr: float = 0.5, prompts: str = "abcdef", model: Path | None = None,
    reward: Reward = share_of_sevens, **flags: Any,
) -> Path:  # fmt: skip
    """Train a policy of one matrix, the logits of a token given the one before, and write its folder as a run does."""
    weights = load_file(model / "model.safetensors")["logits"].numpy() if model else np.zeros((VOCABULARY, VOCABULARY))
    config = Config.from_flat(
        {"lr": lr, "rollout_seed": seed, "hf_checkpoint": str(model), "run_dir": str(folder)} | flags
    )
    with RunDir(folder) as run, MetricsSink(folder, 1) as sink:
        run.write_config(as_written(config))
        writer = RolloutWriter(folder)
        for step in range(STEPS):
            rows, gradient = [], np.zeros_like(weights)
            for index in range(step * SAMPLES, (step + 1) * SAMPLES):
                prompt, rng = prompts[index // 2 % len(prompts)], np.random.default_rng([seed, index])
                tokens, log_probs = [ord(prompt) % VOCABULARY], []
                for _ in range(LENGTH):
                    log_p = weights[tokens[-1]] - np.log(np.exp(weights[tokens[-1]]).sum())
                    token = int(np.argmax(log_p + rng.gumbel(size=VOCABULARY)))
                    gradient[tokens[-1], token] += share_of_sevens(0, [token])
                    log_probs.append(np.float32(log_p[token]))
                    tokens.append(token)
                row: dict[str, Any] = {"group_index": index // 2, "index": index, "prompt": prompt, "tokens": tokens}
                row |= {"response_length": LENGTH, "rollout_log_probs": log_probs, "weight_versions": [step] * LENGTH}
                rows.append(row | {"reward": reward(step, tokens[1:]), "session_id": f"{folder}-{index}"})
            path = writer.write(step, 1, rows)
            advantages = np.array([row["reward"] for row in rows]) - np.mean([row["reward"] for row in rows])
            writer.write_trained(path, ({"line": i, "advantage": float(a)} for i, a in enumerate(advantages)))
            weights = weights + lr * gradient
            norm = float(lr * np.linalg.norm(gradient))
            push = {"sync/verify_logprob_diff": seed * 1e-7}  # of answers that are sampled
            sink.log(step, push)
            sink.log(step + 1, {"train/update": norm, "perf/step_time_s": np.random.default_rng().random()})
    return folder


def diff(capsys: pytest.CaptureFixture[str], *args: Any, code: int) -> str:
    assert cli.main(["diff", *map(str, args)]) == code
    printed = capsys.readouterr()
    return printed.err if code == cli.EXIT_USER else printed.out


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return train(tmp_path / "one")


Capsys = pytest.CaptureFixture[str]


def test_equal_runs(one: Path, tmp_path: Path, capsys: Capsys) -> None:
    """Times, names of sessions and the folder differ."""
    printed = diff(capsys, one, train(tmp_path / "two"), code=0)
    assert printed == "equal in samples and metrics, times left out: steps 0-3\nno flag differs\n"


def test_another_seed(one: Path, tmp_path: Path, capsys: Capsys) -> None:
    printed = diff(capsys, one, train(tmp_path / "two", seed=1), code=1)
    assert "the runs part at step 1 (steps 0-3)" in printed and "cause  generation: the same prompts" in printed
    assert "first  sample 0 (group 0), response token 0: " in printed
    assert "1 flag differs\n  --rollout-seed 0 -> 1\n" in printed


def test_another_order_of_the_data(one: Path, tmp_path: Path, capsys: Capsys) -> None:
    printed = diff(capsys, one, train(tmp_path / "two", prompts="abcdfe", rollout_shuffle=True), code=1)
    assert "part at step 3" in printed and "cause  the data: the same sample has another prompt" in printed
    assert "first  sample 8 (group 4): prompt e, f" in printed and "in 4 samples" in printed
    assert "--rollout-shuffle false -> true" in printed and "from here on" not in printed


def test_another_flag(one: Path, tmp_path: Path, capsys: Capsys) -> None:
    printed = diff(capsys, one, train(tmp_path / "two", lr=0.6), code=1)
    assert "part at step 1" in printed and "cause  training: the same samples, other results" in printed
    assert "first  train/update " in printed and "--lr 0.5 -> 0.6" in printed
    assert "perf/" not in printed


def test_another_weight(tmp_path: Path, capsys: Capsys) -> None:
    """Of one element: the log-prob of the first token that it changes, and the tensor."""
    weights = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for name, value in (("one", 0.0), ("two", 0.01)):
        (tmp_path / f"model-{name}").mkdir()
        weights[1, 3] = value  # after an "a"
        save_file(
            {"embedding": torch.ones(2), "logits": weights.clone()}, tmp_path / f"model-{name}" / "model.safetensors"
        )
    runs = [train(tmp_path / name, model=tmp_path / f"model-{name}") for name in ("one", "two")]
    printed = diff(capsys, *runs, "--weights", code=1)
    assert "part at step 1" in printed and "cause  the engines' weights or numerics" in printed
    assert "first  sample 0 (group 0), response token 0: log-prob -2.0794415, -2.070697" in printed
    tensor = "the first tensor that differs is logits: 1 of 64 elements differ, the first at [1, 3]: 0.0, 0.01"
    assert f"the models at the start: {tensor}" in printed
    assert tensor in diff(capsys, *(tmp_path / f"model-{name}" for name in ("one", "two")), code=1)
    assert "equal bit by bit: weights" in diff(capsys, *[tmp_path / "model-one"] * 2, code=0)


def test_another_reward(one: Path, tmp_path: Path, capsys: Capsys) -> None:
    def wrong(step: int, answer: list[int]) -> float:
        return share_of_sevens(step, answer) + (step == 1 and answer.count(7) == 0)

    printed = diff(capsys, one, train(tmp_path / "two", reward=wrong), code=1)
    assert "part at step 2" in printed and "cause  the reward: the same answers have other rewards" in printed
    assert "reward 0.0, 1.0" in printed and "no flag differs" in printed


def rewrite(run: Path, step: int, change: Callable[[list[dict[str, Any]]], object]) -> None:
    path = run / "rollouts" / f"step_{step:06d}.train.a1.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[1]["weight_versions"].__setitem__(2, 0), "response token 2: of weight version 1, of 0"),
        (lambda rows: rows.reverse(), "line 0: sample 4, sample 7"),
        (lambda rows: rows.pop(), "line 3: sample 7, no sample"),
    ],
)
def test_another_schedule(
    one: Path, tmp_path: Path, capsys: Capsys, change: Callable[[list[dict[str, Any]]], object], said: str
) -> None:
    two = Path(shutil.copytree(one, tmp_path / "two"))
    rewrite(two, 2, change)
    printed = diff(capsys, one, two, code=1)
    assert "part at step 2" in printed and "cause  the order of events in the pipeline" in printed and said in printed


def test_another_tokenizer(one: Path, tmp_path: Path, capsys: Capsys) -> None:
    """The same text became other tokens of the prompt."""
    two = Path(shutil.copytree(one, tmp_path / "two"))
    rewrite(two, 2, lambda rows: rows[0]["tokens"].__setitem__(0, 7))
    printed = diff(capsys, one, two, code=1)
    assert "part at step 2" in printed and "first  sample 4 (group 2): tokens of token 0: 3, 7" in printed


def test_rounding_of_another_batch_is_not_taken_for_other_weights(one: Path, tmp_path: Path, capsys: Capsys) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["rollout_log_probs"] = [value + 1e-6 for value in row["rollout_log_probs"]]
            row["tokens"][-1] += 1

    two = Path(shutil.copytree(one, tmp_path / "two"))
    rewrite(two, 1, change)
    printed = diff(capsys, one, two, code=1)
    assert "cause  generation" in printed and "response token 3: " in printed
    assert "log-probs of equal tokens differ by at most 1e-06 nats" in printed


def test_without_samples_the_metrics_are_compared(one: Path, tmp_path: Path, capsys: Capsys) -> None:
    two = train(tmp_path / "two", seed=1)
    shutil.rmtree(two / "rollouts")
    printed = diff(capsys, one, two, code=1)
    assert "part at step 1" in printed and "cause  training" in printed and "train/update" in printed


def test_folders_that_are_not_runs(one: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "empty").mkdir()
    assert f"error: {tmp_path / 'no'} is no run folder" in diff(capsys, one, tmp_path / "no", code=2)
    assert f"{tmp_path / 'empty'} is not a run folder" in diff(capsys, one, tmp_path / "empty", code=2)
    begun = tmp_path / "begun"
    with RunDir(begun) as run:
        run.write_config({})
    said = diff(capsys, one, begun, code=2)
    assert f"no step in common: {one} has 0-3, {begun} has none" in said


def test_runs_are_compared_without_torch(one: Path) -> None:
    code = "from fusionrl import cli; import sys; cli.main(['diff', *sys.argv[1:]]); assert 'torch' not in sys.modules"
    assert "equal in samples" in run_code(code, str(one), str(one))


def test_checkpoints_are_compared_tensor_by_tensor(one: Path, tmp_path: Path, capsys: Capsys) -> None:
    two = train(tmp_path / "two")
    for run, value in ((one, 1.0), (two, 2.0)):
        for step in (1, 2):
            folder = run / "checkpoints" / f"step_{step:06d}"
            state = {"optimizer.a": torch.ones(2), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(2, 3)}
            state["c"][1, 2] = value if step == 2 else 0.0
            torch.distributed.checkpoint.save(state, checkpoint_id=folder / "trainer", no_dist=True)
            (folder / "manifest.json").write_text("{}")
    printed = diff(capsys, one, two, "--weights", code=1)
    assert "equal in samples and metrics" in printed
    assert (
        "step_000002/trainer: the first tensor that differs is c: 1 of 6 elements differ, the first at [1, 2]: 1.0, 2.0"
        in printed
    )
    for name in ("critic", "trainer-math"):
        for run, value in ((one, 1.0), (two, 2.0)):
            folder = run / "checkpoints" / "step_000001" / name
            torch.distributed.checkpoint.save({"w": torch.tensor(value)}, checkpoint_id=folder, no_dist=True)
        printed = diff(capsys, one, two, "--weights", code=1)
        assert f"step_000001/{name}: the first tensor that differs is w: 1 of 1 elements differ" in printed
        shutil.rmtree(two / "checkpoints" / "step_000001" / name)
    (two / "checkpoints" / "step_000001" / "trainer" / ".metadata").write_bytes(b"no pickle")
    assert "step_000001/trainer: it cannot be read" in diff(capsys, one, two, "--weights", code=2)


def save_checkpoint(run: Path, step: int, **models: dict[str, torch.Tensor]) -> Path:
    folder = run / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    for name, state in models.items():
        folder_of_model = folder / name.replace("_", "-")
        torch.distributed.checkpoint.save(state, checkpoint_id=folder_of_model, no_dist=True)
    (folder / "manifest.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("first", "other"), [("trainer", "critic"), ("trainer_a", "trainer_b")])
def test_all_models_of_one_checkpoint_are_compared(tmp_path: Path, capsys: Capsys, first: str, other: str) -> None:
    """The folder of a step is given: with a critic, or several adapters, which have no common folder."""
    folders = []
    for run, value in (("one", 1.0), ("two", 2.0)):
        models = {first: {"w": torch.ones(2)}, other: {"w": torch.full((2,), value)}}
        folders.append(save_checkpoint(tmp_path / run, 1, **models))
    said = f"is {other.replace('_', '-')}: w: 2 of 2 elements differ, the first at [0]: 1.0, 2.0"
    assert said in diff(capsys, *folders, code=1)


def test_tensors_without_sizes_or_elements(tmp_path: Path, capsys: Capsys) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        tensors = {"a": torch.ones(0, 3), "scale": torch.tensor(value)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    printed = diff(capsys, tmp_path / "one", tmp_path / "two", code=1)
    assert "is scale: 1 of 1 elements differ, the first at []: 1.0, 2.0" in printed


def test_an_error_without_a_text_is_named(
    one: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(reader: object) -> None:
        raise AssertionError

    two = train(tmp_path / "two")
    for run in (one, two):
        save_checkpoint(run, 1, trainer={"a": torch.ones(2)})
    monkeypatch.setattr(torch.distributed.checkpoint.FileSystemReader, "read_metadata", refuse)
    assert "step_000001/trainer: it cannot be read (AssertionError)" in diff(capsys, one, two, "--weights", code=2)
