"""Published multimodal folders through the trainer: what is read, saved and pushed, in several layouts."""

from __future__ import annotations

import json
from collections import ChainMap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fusionrl.engines.disk_versions import pull_version
from fusionrl.plan.layout import TrainerLayout
from tests.trainer import hf_models, trainer_worker
from tests.trainer.trainer_worker import LocalRanks, Samples, config_of

DENSE, MIXED = "qwen3_5_text", "qwen3_5_moe_text"


def tensors_of(folder: Path | str) -> dict[str, torch.Tensor]:
    return {name: x for file in sorted(Path(folder).glob("*.safetensors")) for name, x in load_file(file).items()}


def assert_equal(found: Path | str, want: Path | str) -> None:
    """Every tensor of both folders, to the bit, and what config.json says."""
    left, right = tensors_of(found), tensors_of(want)
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert left[name].dtype == tensor.dtype and torch.equal(left[name], tensor), name
    configs = [json.loads(Path(folder, "config.json").read_text()) for folder in (found, want)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("family", "precision", "sizes"),
    [
        (DENSE, "fp32", {"tp": 2}),
        (DENSE, "bf16", {"pp": 2}),
        (MIXED, "fp32", {"ep": 2}),
        (MIXED, "fp32", {"tp": 2, "etp": 2}),
        (MIXED, "bf16", {}),
    ],
    ids=str,
)
def test_saved_as_it_was_read(
    workers: LocalRanks, tmp_path: Path, family: str, precision: str, sizes: dict[str, int]
) -> None:
    """After a step that changes nothing; and transformers loads it with both classes."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = hf_models.make_published(tmp_path, family, family == DENSE, dtype)
    source, layout = tmp_path / "published", TrainerLayout(2 if sizes else 1, **sizes)
    assert {x.dtype for name, x in tensors_of(source).items() if name.endswith("A_log")} == {torch.float32}
    workers.start(config_of(source, lr=0.0, precision=precision), layout)
    workers.train(Samples(4).shards(layout.dp))
    workers.call("save_hf", str(tmp_path / "out"))
    assert_equal(tmp_path / "out", source)

    text = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(text[name], tensor), name
    whole, again = (AutoModelForImageTextToText.from_pretrained(path) for path in (tmp_path / "out", source))
    for name, tensor in again.state_dict().items():
        assert torch.equal(whole.state_dict()[name], tensor), name

    pushed = ChainMap(*(part for part, _, _ in workers.run(trainer_worker.gathered, "float32")))
    want = tensors_of(tmp_path / "text")
    assert pushed.keys() == want.keys() - ({"lm_head.weight"} if family == DENSE else set())
    for name, tensor in pushed.items():
        held = torch.float32 if name.endswith("A_log") else dtype
        assert torch.equal(tensor, want[name].to(held).float()), name


def test_what_was_trained_is_saved_in_its_place(workers: LocalRanks, tmp_path: Path) -> None:
    """The text model's tensors change, the others do not; the text model of the folder gives the trainer's numbers."""
    hf_models.make_published(tmp_path, MIXED, False)
    samples = Samples(5, seed=21)
    workers.start(config_of(tmp_path / "published", lr=1e-2))
    (shard,) = samples.shards()
    workers.train([shard])
    scores: Any = workers.call("score", shard)[0]
    workers.call("save_hf", str(tmp_path / "out"))
    before, after = tensors_of(tmp_path / "published"), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        is_text = not name.startswith(("model.visual.", "mtp."))
        assert torch.equal(after[name], tensor) != is_text, name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert np.abs(hf_models.all_log_probs(loaded, samples) - np.concatenate(scores)).max() <= 3e-5


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_pushed_by_files_as_it_was_read(workers: LocalRanks, tmp_path: Path, mode: str) -> None:
    hf_models.make_published(tmp_path, MIXED, False)
    disk = str(tmp_path / "disk")
    config = config_of(tmp_path / "published", update_weight_mode=mode, update_weight_disk_dir=disk)
    workers.start(config, TrainerLayout(2, ep=2))
    workers.run(_plan)
    local = str(tmp_path / "local") if mode == "delta" else None
    for version in range(2):
        (written, _) = workers.run(_written, version)
        folder = pull_version(written, local)
        assert folder is not None
        workers.call("save_hf", str(tmp_path / f"out{version}"))
        assert_equal(folder, tmp_path / f"out{version}")
        workers.train(Samples().shards(2))
    assert_equal(tmp_path / "out0", tmp_path / "published")


def _written(actor: Any, version: int) -> str:
    return str(actor.write_weights(version, [])["folder"])


def _plan(actor: Any) -> None:
    """What the process of a trainer gives to its rank."""
    from types import SimpleNamespace

    actor.plan = SimpleNamespace(rollout_dtype="fp32", quantization=None, pushed_shape=actor.shape, lora_push=None)
