"""Checkpoints and PEFT folders of adapters: a resume is exact, at any layout, and the base stays where it is."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as load_tensors
from transformers import AutoModelForCausalLM

from fusionrl.models.hf_io import PeftReader
from fusionrl.models.peft import read_peft
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.layout import TrainerLayout
from tests.trainer.trainer_worker import Failed, Samples, config_of

LORA = {"lora_rank": 4, "lora_alpha": 8, "lr": 1e-2, "weight_decay": 0.01, "clip_grad": 1.0}


def saved_adapters(actor, path):
    """The base of a checkpoint's adapters, and their tensors."""
    from fusionrl.trainer.checkpoint import saved_adapters

    adapted, tensors = saved_adapters(path, actor.shape)
    return adapted.base, {name: tensor.numpy() for name, tensor in tensors.items()}


def rollouts(workers, layout, numbers):
    return [workers.train(Samples(6, seed=i).shards(layout.dp, 2), layout, i) for i in numbers]


def tensors_in(path):
    """All tensors of a checkpoint, whole: adapters, fp32 master weights and moments."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "properties")
    }
    load_tensors(tensors, storage_reader=FileSystemReader(path), no_dist=True)
    return tensors


def test_resume_is_bit_exact_and_small(workers, hf, tmp_path):
    """Another process writes it during the next step. Adapters of experts have an optimizer of their own."""
    layout, path = TrainerLayout(2, ep=2), str(tmp_path / "checkpoint")
    folder, _ = hf("qwen3_moe", False)
    flags = LORA | {"lora_rank": 128, "use_kl_loss": True, "async_save": True, "verify_checkpoints": True}
    config = config_of(folder, precision="bf16", **flags)
    workers.start(config, layout)
    rollouts(workers, layout, range(1))
    workers.call("begin_save", path, 0)
    at_save = workers.call("state_hashes")
    uninterrupted = rollouts(workers, layout, range(1, 2))
    workers.call("finish_save")
    at_end = workers.call("state_hashes")

    workers.start(config, layout)
    restored = workers.call("load", path)
    assert [facts["hashes"] for facts in restored] == at_save
    assert workers.call("state_hashes") == at_save
    assert rollouts(workers, layout, range(1, 2)) == uninterrupted
    assert workers.call("state_hashes") == at_end != at_save
    tensors = tensors_in(path)
    num_trained = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("decoder."))
    assert all(".adapter." in name for name in tensors)
    num_bytes = sum(file.stat().st_size for file in Path(path).iterdir())
    assert num_bytes < 18 * num_trained


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("qwen3", [TrainerLayout(2, tp=2), TrainerLayout(2, pp=2), TrainerLayout(1)]),
        ("qwen3_moe", [TrainerLayout(2, ep=2), TrainerLayout(2, tp=2), TrainerLayout(1)]),
        ("phi3", [TrainerLayout(2, tp=2), TrainerLayout(1)]),  # gate over up in one tensor
    ],
    ids=str,
)
def test_another_layout_has_the_same_state_and_goes_on_with_the_same_numbers(workers, hf, tmp_path, family, layouts):
    folder, _ = hf(family, False)
    config, saved = config_of(folder, **LORA), str(tmp_path / "saved")
    first, *others = layouts
    workers.start(config, first)
    rollouts(workers, first, range(2))
    workers.call("save", saved, 1)
    wanted = rollouts(workers, first, range(2, 3))
    state = tensors_in(saved)
    assert any(name.startswith("optimizer.state.exp_avg_sq.") and tensor.any() for name, tensor in state.items())
    for number, layout in enumerate(others):
        again = str(tmp_path / f"again-{number}")
        workers.start(config, layout)
        assert not workers.call("load", saved)[0]["rng_restored"]
        workers.call("save", again, 1)
        resaved = tensors_in(again)
        assert resaved.keys() == state.keys()
        assert all(torch.equal(resaved[name], tensor) for name, tensor in state.items())
        for before, after in zip(wanted, rollouts(workers, layout, range(2, 3)), strict=True):
            for name in ("train/loss", "train/grad_norm"):
                assert after[name] == pytest.approx(before[name], rel=1e-5, abs=1e-6), name


def log_probs(model, samples):
    """Log-probs of the response tokens, one sample after the other."""
    found = []
    for ids, length in zip(samples.tokens, samples.response, strict=True):
        with torch.no_grad():
            values = model(torch.tensor(ids[None], dtype=torch.long)).logits[0].log_softmax(-1)
        found.append(values[-length - 1 : -1].gather(1, torch.tensor(ids[-length:, None], dtype=torch.long))[:, 0])
    return torch.cat(found)


def scored(workers, layout, samples):
    shards = samples.shards(layout.dp, 1)
    return torch.cat([torch.from_numpy(part) for part in workers.call("score", *shards)[0]])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_peft_reads_what_is_written(workers, hf, tmp_path, family):
    """Also the experts, which PEFT joins as transformers does; and the checkpoint gives the same tensors."""
    folder, _ = hf(family, False)
    layout, samples = TrainerLayout(2, tp=2), Samples(4)
    excluded = {"exclude_modules": ["layers.0.self_attn.v_proj"], "lora_use_rslora": True}
    workers.start(config_of(folder, **LORA, **excluded), layout)
    rollouts(workers, layout, range(2))
    path = tmp_path / "adapter"
    workers.call("save_hf", str(path))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), path).eval()
    assert model.peft_config["default"].base_model_name_or_path == str(folder)
    torch.testing.assert_close(log_probs(model, samples), scored(workers, layout, samples), atol=1e-5, rtol=0)
    with model.disable_adapter():
        assert (log_probs(model, samples) - scored(workers, layout, samples)).abs().max() > 1e-3

    workers.call("save", str(tmp_path / "checkpoint"), 1)
    base, tensors = workers.run(saved_adapters, str(tmp_path / "checkpoint"))[0]
    reader = PeftReader(read_peft(path, read_model_shape(folder)))
    assert base == str(folder)
    assert tensors.keys() == reader.names
    assert all(np.array_equal(reader.get(name, value.shape), value) for name, value in tensors.items())


def test_a_run_starts_from_an_adapter_of_peft(workers, hf, tmp_path):
    folder, _ = hf("qwen3", False)
    layout, samples = TrainerLayout(2, pp=2), Samples(4)
    lora = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora).eval()
    model.save_pretrained(tmp_path / "adapter")
    flags = {"lora_rank": 4, "lora_alpha": 6, "lora_adapter_path": str(tmp_path / "adapter")}
    for named in ({}, {"lora_adapters": [f"math={tmp_path / 'adapter'}"], "lora_adapter_path": None}):
        targets = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
        workers.start(config_of(folder, **flags | targets | named), layout)
        torch.testing.assert_close(scored(workers, layout, samples), log_probs(model, samples), atol=1e-5, rtol=0)
    with pytest.raises(
        Failed, match=re.escape("belong to other modules; give --target-modules down_proj q_proj v_proj")
    ):
        workers.start(config_of(folder, **flags), layout)


@pytest.mark.parametrize(
    ("saved", "run", "part"),
    [
        (LORA, {}, "it has adapters and no weights; give --lora-rank 4 to resume, or merge"),
        ({}, LORA, "it has weights and no adapters; leave out --lora-rank to resume"),
    ],
)
def test_a_resume_of_another_kind_is_refused(workers, hf, tmp_path, saved, run, part):
    folder, _ = hf("qwen3", False)
    workers.start(config_of(folder, **saved))
    workers.call("save", str(tmp_path / "checkpoint"), 0)
    workers.start(config_of(folder, **run))
    with pytest.raises(Failed, match=re.escape(part)):
        workers.call("load", str(tmp_path / "checkpoint"))
    if not saved:  # what the message names: the weights there become a base
        start = config_of(folder, megatron_checkpoint=str(tmp_path / "checkpoint"), **run)
        workers.start(start)
        workers.call("save", str(tmp_path / "adapters"), 0)
        hashes = workers.call("state_hashes")
        workers.start(start)
        assert workers.call("load", str(tmp_path / "adapters"))[0]["rng_restored"]
        assert workers.call("state_hashes") == hashes
    if saved:
        other = tmp_path / "other"
        shutil.copytree(folder, other)
        weights = {name: value * 1.001 for name, value in load_file(other / "model.safetensors").items()}
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
        workers.start(config_of(other, **saved))
        with pytest.raises(
            Failed, match=re.escape(f"belong to the weights in {folder}, and those in {other} are others")
        ):
            workers.call("load", str(tmp_path / "checkpoint"))
        with pytest.raises(Failed, match="it has adapters alone, of the base in"):
            workers.start(config_of(folder, megatron_checkpoint=str(tmp_path / "checkpoint")))
