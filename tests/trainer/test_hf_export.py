"""Weights in and out of Hugging Face folders through the trainer."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fusionrl.plan.layout import TrainerLayout
from tests.tiny_model import make_fp8
from tests.trainer import hf_models
from tests.trainer.trainer_worker import Failed, Samples, config_of

TWO = TrainerLayout(2, tp=2)


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        ("llama", False, TrainerLayout(1)),
        ("qwen2", True, TrainerLayout(2, pp=2)),
        ("glm4", False, TWO),
        ("qwen2_moe", False, TrainerLayout(2, ep=2)),
        ("qwen3_moe", False, TrainerLayout(2, tp=2, etp=2)),
        ("glm4_moe", False, TrainerLayout(2, ep=2)),
        ("deepseek_v2", False, TWO),
        ("deepseek_v3", False, TrainerLayout(2, ep=2)),
    ],
    ids=str,
)
def test_round_trip_is_bit_exact(workers, hf, tmp_path, layout, family, tied):
    folder, model = hf(family, tied, vocab_size=121)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    workers.start(config_of(folder), layout)
    out = tmp_path / "out"
    workers.call("save_hf", str(out))
    loaded = AutoModelForCausalLM.from_pretrained(out)
    want = dict(model.named_parameters())
    assert dict(loaded.named_parameters()).keys() == want.keys()
    for name, param in loaded.named_parameters():
        assert param.dtype == want[name].dtype
        assert torch.equal(param, want[name]), name
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    assert bool(biases) == (family in ("glm4_moe", "deepseek_v3"))
    for name, buffer in biases.items():
        assert torch.equal(loaded.get_buffer(name), buffer), name
    assert (out / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("layout", [TrainerLayout(1), TrainerLayout(2, pp=2)], ids=str)
def test_all_but_a_balancing_bias_is_saved_in_bf16(workers, hf, tmp_path, layout):
    """A bias that is rounded would choose other experts than the engines do."""
    folder, model = hf("glm4_moe", False)
    (bias,) = (buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias"))
    assert not torch.equal(bias, bias.bfloat16().float())
    workers.start(config_of(folder, precision="bf16"), layout)
    workers.call("save_hf", str(tmp_path / "out"))
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved.pop("model.layers.1.mlp.gate.e_score_correction_bias"), bias)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_was_trained_is_what_is_saved(workers, hf, tmp_path):
    folder, model = hf("qwen3", True)
    samples = Samples(5, seed=21)
    workers.start(config_of(folder, lr=1e-2))
    (shard,) = samples.shards()
    workers.train([shard])
    scores = workers.call("score", shard)[0]
    workers.call("save_hf", str(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    moved = 0.0
    with torch.no_grad():
        for i in range(5):
            want, _ = hf_models.response_log_probs(loaded, samples, i)
            old, _ = hf_models.response_log_probs(model, samples, i)
            assert (want - torch.tensor(scores[i])).abs().max() <= 1e-5
            moved = max(moved, float((want - old).abs().max()))
    assert moved > 0.1
    with pytest.raises(Failed, match="it exists already") as failure:
        workers.call("save_hf", str(tmp_path / "out"))
    assert failure.value.kind == "ValueError"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_proj.weight": None}, "k_proj.weight is in none of its files"),
        ({"k_proj.weight": torch.zeros(8, 32)}, r"k_proj.weight has shape \(8, 32\).*\(16, 32\)"),
        ({"k_proj.bias": torch.zeros(16)}, "k_proj.bias is no part"),
    ],
    ids=["missing", "shape", "extra"],
)
def test_a_malformed_folder_is_an_error_that_names_it(workers, hf, tmp_path, change, message):
    folder = tmp_path / "model"
    shutil.copytree(hf("llama", False)[0], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.1.self_attn.{name}": tensor for name, tensor in change.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Failed, match=message) as failure:
        workers.start(config_of(folder))
    assert failure.value.kind == "ValueError"
    assert f"--hf-checkpoint {folder}" in failure.value.message


def test_a_reference_of_another_shape_is_refused(workers, hf):
    config = config_of(hf("llama", True)[0], use_kl_loss=True, ref_load=str(hf("qwen2", True)[0]))
    with pytest.raises(Failed, match=r"--ref-load .* another shape"):
        workers.start(config)


@pytest.mark.parametrize(
    ("values", "passed", "message"),
    [
        ({}, {"transformer": {"batch_p2p_comm": True}}, "--batch-p2p-comm True: on a CPU it must be False"),
        ({"lr_decay_style": "cosine"}, {}, "give --lr-decay-iters"),
        (
            {"lr_decay_style": "cosine", "lr_decay_iters": 3, "lr_warmup_iters": 3},
            {},
            "--lr-warmup-iters 3 is not below",
        ),
        ({}, {"transformer": {"recompute_granularity": "nonsense"}}, "Megatron-core refuses"),
        ({"precision": "fp32"}, {"optimizer": {"no_such_field": 1}}, "Megatron-core refuses"),
    ],
)
def test_settings_that_cannot_be_are_refused(workers, hf, values, passed, message):
    with pytest.raises(Failed, match=message) as failure:
        workers.start(config_of(hf("llama", True)[0], passthrough=passed, **values))
    assert failure.value.kind == "ValueError"


def test_sizes_that_do_not_divide_the_model_are_refused(workers, hf):
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "num_hidden_layers": 3}
    with pytest.raises(Failed, match="--tensor-model-parallel-size 2 does not divide") as failure:
        workers.start(config_of(hf("llama", True, **sizes)[0]), TWO)
    assert failure.value.kind == "ValueError"


def test_a_checkpoint_in_fp8_is_read_whole(workers, tiny_model, tmp_path):
    """Blocks that no rank's part ends with; what is saved has every value times its scale, and no quantisation."""
    whole = make_fp8(tiny_model, tmp_path / "fp8", (24, 40), left_out=("layers.1.mlp",))
    workers.start(config_of(tmp_path / "fp8"), TWO)
    workers.call("save_hf", str(tmp_path / "out"))
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == whole.keys()
    assert all(torch.equal(saved[name], whole[name]) for name in whole)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
