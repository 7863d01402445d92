"""Whole runs of a model that sees: its tower trained or frozen, evaluation sets of their own, stops and resumes."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fusionrl.observe.rollouts import read_rollouts
from tests.e2e.launch import launch, metrics_of, run, train_steps, undocumented_files
from tests.e2e.test_exactness import numbers
from tests.e2e.test_pipelines import LONG_ANSWERS
from tools.make_vision_quickstart import write_quickstart

pytestmark = pytest.mark.e2e
TOWER = "model.visual."
LAST = f"{TOWER}deepstack_merger_list.1."  # its features enter after the last layer, where no answer sees them


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vision quickstart's model and pictures."""
    folder = tmp_path_factory.mktemp("shapes")
    write_quickstart(folder, seed=5)
    return folder


@pytest.fixture(scope="module")
def flags(shapes: Path) -> list[str]:
    """8 pictures, 8 x 4 samples a step: each is asked about before and after a push."""
    return [
        *("--mode", "rl", "--hf-checkpoint", str(shapes / "model"), "--device", "cpu", "--apply-chat-template"),
        *("--prompt-data", f"{shapes / 'train.parquet'}@[0:8]", "--input-key", "problem", "--label-key", "answer"),
        *("--multimodal-keys", '{"image": "images"}', "--custom-rm-path", "tests/e2e/hooks.py:partial_credit"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "6"),
        *("--rollout-shuffle", "--lr", "1e-3"),
    ]


def tower_of(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of the tower of a Hugging Face folder."""
    return {name: value for name, value in load_file(folder / "model.safetensors").items() if name.startswith(TOWER)}


def test_a_tower_that_is_trained(shapes: Path, flags: list[str], tmp_path: Path) -> None:
    """Acceptance points A6, A10, A12 and A13.

    After pushes, engines are asked again about pictures that they have seen. A resume trains on the samples that the
    run has saved: every bit is the same.
    """
    folder, saved = tmp_path / "run", str(tmp_path / "{rollout_id}.jsonl")
    rows = f"{shapes / 'eval.parquet'}@[0:4]"
    sets = [{"name": "same", "path": rows}, {"name": "small", "path": rows, "image_max_pixels": 32 * 32}]
    (tmp_path / "eval.yaml").write_text(json.dumps({"eval": {"datasets": sets}}))
    flags = [*flags, "--num-rollout", "2", "--save-interval", "1", "--keep-checkpoints", "2"]
    live = ["--eval-config", str(tmp_path / "eval.yaml"), "--eval-interval", "2", "--verify-weights", "always"]
    live += ["--save-hf", str(tmp_path / "trained"), "--save-debug-rollout-data", saved, "--run-dir", str(folder)]
    run([*flags, *live], tmp_path)
    metrics = metrics_of(folder)
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert all(row["sync/verify_logprob_diff"] < 1e-5 for row in metrics)
    assert all(row["train/logprob_diff_max"] < 1e-4 and row["train/grad_norm"] > 0 for row in metrics[1:])
    assert all((row["rollout/images"], row["rollout/image_tokens"]) == (32, 4 * 32) for row in metrics[1:])
    new, old = tower_of(tmp_path / "trained"), tower_of(shapes / "model")
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name], old[name]) == name.startswith(LAST) for name in old)
    for name, num_tokens in (("same", 4), ("small", 1)):
        spans = [row["image_spans"] for row in read_rollouts(folder, f"eval-{name}")]
        assert [image["num_tokens"] for ((_, image),) in spans] == [num_tokens] * 8
    assert not undocumented_files(folder) and not (folder / "engine-images").exists()

    again = tmp_path / "again"
    shutil.copytree(folder / "checkpoints" / "step_000001", again / "checkpoints" / "step_000001")
    shutil.copyfile(folder / "config.json", again / "config.json")
    train = ["--debug-train-only", "--load-debug-rollout-data", saved, "--in-process", "--resume"]
    run([*flags, *train, "--run-dir", str(again)], tmp_path)
    whole = numbers(folder)
    assert numbers(again) == {2: whole[2]}


def has_pushed_with_groups_under_way(metrics: list[dict]) -> bool:
    """Two pushes are reported, and a step, while answers to further prompts were sampled."""
    return sum("sync/bytes" in row for row in metrics) >= 2 and metrics[-1].get("pipeline/running", 0) > 0


def test_a_frozen_tower_and_answers_that_a_stop_interrupts(shapes: Path, flags: list[str], tmp_path: Path) -> None:
    """Acceptance points A10 and A12: another layout continues with the answers and their images."""
    folder, model = tmp_path / "run", tmp_path / "trained"
    flags = [*flags, "--freeze-vision", "--pipeline", "async-partial", *LONG_ANSWERS, "--verify-weights", "always"]
    flags += ["--rollout-batch-size", "4", "--rollout-max-response-len", "48", "--run-dir", str(folder)]
    with launch([*flags, "--num-rollout", "1000"], tmp_path) as launched:
        launched.wait_for(lambda: has_pushed_with_groups_under_way(metrics_of(folder)))
        os.kill(launched.process.pid, signal.SIGTERM)
        assert launched.wait() == 143
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert list((checkpoint / "images").iterdir())
    last = train_steps(folder)[-1][1] + 1
    more = ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--num-rollout", str(last)]
    run([*flags, *more, "--resume", "--no-save", "--save-hf", str(model)], tmp_path)
    metrics = metrics_of(folder)
    assert train_steps(folder) == [(1 + (step == last), step) for step in range(1, last + 1)]
    pushes, gaps = ([row for row in metrics if name in row] for name in ("sync/bytes", "train/logprob_diff_max"))
    assert gaps and all(row["train/logprob_diff_max"] < 1e-4 for row in gaps)
    assert all(row["sync/verify_logprob_diff"] < 1e-5 for row in pushes)
    new, old = tower_of(model), tower_of(shapes / "model")
    assert all(torch.equal(new[name], old[name]) for name in old)
    whole, without = pushes[0]["sync/bytes"], pushes[0]["sync/bytes"] - sum(tensor.nbytes for tensor in new.values())
    for attempt in (1, 2):
        first, *later = [row["sync/bytes"] for row in pushes if row["attempt"] == attempt]
        assert first == whole and set(later) <= {without} and (later or attempt == 2)
