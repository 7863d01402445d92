"""Weights of Megatron checkpoints: read at any layout, converted both ways."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fusionrl.plan.layout import TrainerLayout
from tests.trainer import trainer_worker
from tests.trainer.forked_program import ForkedProgram
from tests.trainer.trainer_worker import Failed, Samples, config_of

TOOL = str(Path(__file__).parents[2] / "tools" / "convert.py")


@pytest.fixture
def convert(forkserver, tmp_path):
    """The tool, with Megatron imported already: convert("to-hf", …)."""
    return lambda *arguments: ForkedProgram([TOOL, *arguments], tmp_path).wait(300)


@pytest.mark.parametrize("family", ["qwen2", "glm4_moe"])
def test_there_and_back(workers, hf, tmp_path, convert, family):
    """Hugging Face → Megatron (the tool) → trainers at a layout that pads the vocabulary → Hugging Face (the tool)."""
    folder, _ = hf(family, False, vocab_size=121)
    if family == "glm4_moe":  # a layer of multi-token prediction, which the Megatron checkpoint does not have
        folder = Path(shutil.copytree(folder, tmp_path / "model"))
        further = {"model.layers.2.enorm.weight": np.arange(32, dtype=np.float32)}
        save_file(load_file(folder / "model.safetensors") | further, folder / "model.safetensors", {"format": "pt"})
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    flags = ("to-megatron", "--hf-checkpoint", str(folder), "--out", str(megatron), "--precision", "fp32")
    if family == "qwen2":  # as started from a shell
        done = subprocess.run([sys.executable, TOOL, *flags], capture_output=True, text=True, timeout=300)
    else:
        done = convert(*flags)
    assert done.returncode == 0, done.stderr
    assert (megatron / "latest_checkpointed_iteration.txt").read_text() == "release"

    workers.start(config_of(folder))
    want = workers.run(trainer_worker.weights)[0]
    # Other weights under the same shape: what is compared below can only come from the Megatron checkpoint.
    other, _ = hf(family, False, vocab_size=121, seed=9)
    values = {"megatron_checkpoint": str(megatron)}
    workers.start(config_of(other, **values), TrainerLayout(2, tp=2, etp=2 if family == "glm4_moe" else 1))
    np.testing.assert_equal(workers.run(trainer_worker.weights)[0], want)

    flags = ("to-hf", "--hf-checkpoint", str(folder), "--megatron-checkpoint", str(megatron), "--out", str(back))
    done = convert(*flags, "--precision", "fp32")
    assert done.returncode == 0, done.stderr
    np.testing.assert_equal(load_file(back / "model.safetensors"), load_file(folder / "model.safetensors"))


def test_a_checkpoint_of_megatron_lm(workers, hf, tmp_path):
    """Its layout of folders (iter_0000020), a vocabulary padded to 128 rows a rank, and further entries."""
    workers.start(config_of(hf("qwen3", True, vocab_size=121)[0]), TrainerLayout(2, pp=2))
    want = workers.run(trainer_worker.weights)[0]
    path = tmp_path / "lm"
    workers.run(save_as_megatron_lm, str(path))
    other, _ = hf("qwen3", True, vocab_size=121, seed=9)
    workers.start(config_of(other, megatron_checkpoint=str(path)), TrainerLayout(2, tp=2))
    np.testing.assert_equal(workers.run(trainer_worker.weights)[0], want)


def save_as_megatron_lm(actor, path: str) -> None:
    """What Megatron-LM's save_checkpoint writes with --ckpt-format torch_dist."""
    import torch
    import torch.distributed as dist

    from fusionrl.trainer import checkpoint, megatron_core
    from fusionrl.trainer.checkpoint_io import PendingFiles, result_queue
    from fusionrl.trainer.model import unwrap

    modules = [unwrap(chunk) for chunk in actor.trained.chunks]
    for module in modules:
        for layer in (getattr(module, "embedding", None), getattr(module, "output_layer", None)):
            layer = getattr(layer, "word_embeddings", layer)
            if getattr(layer, "weight", None) is not None:
                weight = layer.weight.detach()
                padded = torch.cat([weight, weight.new_zeros(128 - len(weight), weight.size(1))])
                layer.weight, layer.num_embeddings, layer.output_size = torch.nn.Parameter(padded), 128, 128
    state = checkpoint._weights_state(modules)
    state |= {"args": {"num_layers": 2}, "checkpoint_version": 3.0, "iteration": 20, "opt_param_scheduler": {"lr": 1.0}}
    folder = Path(path) / "iter_0000020"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (Path(path) / "latest_checkpointed_iteration.txt").write_text("20")
    dist.barrier()
    with result_queue() as results:
        request = megatron_core.save_request(state, str(folder), {})
    PendingFiles(request, results, None).finish()


def test_what_cannot_be_read_is_named(workers, hf, tmp_path, convert):
    folder, _ = hf("llama", True)
    (tmp_path / "old" / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("5\n")
    other, _ = hf("llama", True, num_hidden_layers=3)
    done = convert("to-megatron", "--hf-checkpoint", str(other), "--out", str(tmp_path / "other"))
    assert done.returncode == 0, done.stderr
    for name, message in (
        ("none", "there is no such folder"),
        ("", "it has no Megatron checkpoint"),
        ("old", "Megatron's older format"),
        ("other", "its weights are not those of --hf-checkpoint's model"),
    ):
        with pytest.raises(Failed, match=message) as failure:
            workers.start(config_of(folder, megatron_checkpoint=str(tmp_path / name)))
        assert failure.value.kind == "ValueError"
    done = convert("to-hf", "--hf-checkpoint", str(folder), "--out", str(tmp_path / "x"))
    assert done.returncode == 2
    assert "--megatron-checkpoint" in done.stderr


def test_a_reference_in_torch_dist(workers, hf, tmp_path, convert):
    """--ref-load of a Megatron checkpoint: its log-probs are the Hugging Face folder's, and the policy is untouched."""
    folder, _ = hf("qwen3", True, vocab_size=121)
    other, _ = hf("qwen3", True, vocab_size=121, seed=9)
    megatron = tmp_path / "megatron"
    done = convert("to-megatron", "--hf-checkpoint", str(other), "--out", str(megatron), "--precision", "fp32")
    assert done.returncode == 0, done.stderr
    (shard,), layout = Samples(4, seed=47).shards(), TrainerLayout(2, tp=2)
    policies, references = [], []
    for ref_load in (other, megatron):
        workers.start(config_of(folder, use_kl_loss=True, kl_loss_coef=0.1, ref_load=str(ref_load)), layout)
        policies.append((workers.call("score", shard)[0], workers.run(trainer_worker.weights)[0]))
        references.append(np.concatenate(workers.call("score", shard, "ref")[0]))
    np.testing.assert_equal(*policies)
    assert np.abs(references[0] - references[1]).max() < 1e-6
    assert np.abs(np.concatenate(policies[0][0]) - references[0]).max() > 1e-3
