"""Weights in and out of Hugging Face folders through the trainer, and out of it to engines."""

import json
import shutil
from collections import ChainMap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fusionrl.models.convert import dequantize_mxfp4, quantized
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.plan.push_plan import push_tensors, stage_of_rule
from tests.tiny_model import make_fp8, make_mxfp4
from tests.trainer import hf_models, trainer_worker
from tests.trainer.trainer_worker import Failed, Samples, config_of

TWO = TrainerLayout(2, tp=2)


@pytest.mark.parametrize(
    ("family", "tied", "sizes"),
    [
        ("llama", False, {}),
        ("qwen2", True, {"tp": 2}),
        ("qwen2", True, {"pp": 2}),
        ("qwen3", False, {"cp": 2}),
        ("glm4", False, {"tp": 2}),
        ("qwen2_moe", False, {"ep": 2}),
        ("qwen3_moe", False, {"tp": 2, "etp": 2}),
        ("qwen3_moe", False, {"tp": 2, "ep": 2}),
        ("mixtral", False, {"pp": 2}),
        ("glm4_moe", False, {"ep": 2}),
        ("deepseek_v2", False, {"tp": 2}),
        ("deepseek_v3", False, {"tp": 2}),
        ("deepseek_v3", False, {"ep": 2}),
        ("glm4_moe_lite", False, {"ep": 2}),
        ("phi3", False, {"tp": 2}),
        ("olmo2", False, {"tp": 2}),
        ("smollm3", True, {"pp": 2}),
        ("gemma3_text", True, {"tp": 2}),
        ("olmo3", False, {"pp": 2}),
        ("minimax_m2", False, {"ep": 2}),
        ("gpt_oss", False, {"ep": 2}),
        ("gpt_oss", False, {"tp": 2}),
        ("gpt_oss", False, {"pp": 2}),
        ("qwen3_5_text", False, {"tp": 2}),
        ("qwen3_5_moe_text", True, {"ep": 2}),
        ("qwen3_next", False, {"tp": 2, "etp": 2}),
    ],
    ids=str,
)
def test_what_is_saved_and_pushed_is_what_was_read_bit_by_bit(workers, hf, tmp_path, family, tied, sizes):
    folder, model = hf(family, tied, vocab_size=121)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    layout = TrainerLayout(2 if sizes else 1, **sizes)
    workers.start(config_of(folder), layout)
    out = tmp_path / "out"
    workers.call("save_hf", str(out))
    found, want = AutoModelForCausalLM.from_pretrained(out).state_dict(), model.state_dict()
    assert found.keys() == want.keys()
    assert any(map(is_bias, want)) == (family in ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "minimax_m2"))
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert (out / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]

    answers = workers.run(trainer_worker.gathered, "float32")
    found, want = pushed(answers), load_file(folder / "model.safetensors")
    assert len(found) == sum(len(part) for part, _, _ in answers), "one tensor of two sources"
    if layout.pp > 1 or (layout.ep > 1 and family != "gpt_oss"):  # one rank gathers the stacks of a stage
        assert all(part for part, _, _ in answers), "the work is not spread"
    if tied:
        want.pop("lm_head.weight", None)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    # The plan that is shown before anything runs is the one that is made of what the ranks hold.
    shape = read_model_shape(folder)
    stages = stage_layers(layout, shape.num_layers, {})
    assert stages is not None
    told = push_tensors(shape, stage_of_rule(stages), "float32")
    assert [f"{t.name} {t.stage} {t.nbytes}" for t in told] == answers[0][1]


def is_bias(name: str) -> bool:
    return name.endswith("correction_bias")


def pushed(answers):
    """The tensors of all sources of a push."""
    return dict(ChainMap(*(part for part, _, _ in answers)))


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_all_but_a_balancing_bias_is_saved_in_bf16(workers, hf, tmp_path, family):
    """A bias that is rounded would choose other experts than the engines do. DeepSeek-V3 is also part of Kimi-VL."""
    folder, model = hf(family, False)
    (bias,) = (buffer for name, buffer in model.named_buffers() if is_bias(name))
    assert not torch.equal(bias, bias.bfloat16().float())
    workers.start(config_of(folder, precision="bf16"), TrainerLayout(2, pp=2))
    workers.call("save_hf", str(tmp_path / "out"))
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved.pop("model.layers.1.mlp.gate.e_score_correction_bias"), bias)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_is_read_in_mxfp4_is_saved_and_pushed_in_bf16(workers, tmp_path):
    """By two ranks with two experts each; bf16 has all values of MXFP4."""
    folder = tmp_path / "model"
    hf_models.make(folder, "gpt_oss", False, intermediate_size=64)
    stored = load_file(make_mxfp4(folder) / "model.safetensors")
    workers.start(config_of(folder, precision="bf16"), TrainerLayout(2, ep=2))
    workers.call("save_hf", str(tmp_path / "out"))
    saved = load_file(tmp_path / "out" / "model.safetensors")
    sent = pushed(workers.run(trainer_worker.gathered, "bfloat16"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved.keys() == sent.keys() and len(saved) == len(stored) - 2 * 2
    for name, tensor in saved.items():
        assert torch.equal(tensor, sent[name])
        if f"{name}_blocks" in stored:
            values = dequantize_mxfp4(stored[f"{name}_blocks"], stored[f"{name}_scales"]).transpose(1, 2)
            assert tensor.dtype is torch.bfloat16 and torch.equal(tensor.float(), values), name


def test_what_was_trained_is_what_is_saved(workers, hf, tmp_path):
    folder, model = hf("qwen3", True)
    samples = Samples(5, seed=21)
    workers.start(config_of(folder, lr=1e-2))
    (shard,) = samples.shards()
    workers.train([shard])
    scores = workers.call("score", shard)[0]
    workers.call("save_hf", str(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    want, old = (hf_models.all_log_probs(which, samples) for which in (loaded, model))
    assert np.abs(want - np.concatenate(scores)).max() <= 1e-5
    assert np.abs(want - old).max() > 0.1
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
    ("passed", "message"),
    [
        ({"transformer": {"batch_p2p_comm": True}}, "--batch-p2p-comm True: on a CPU it must be False"),
        ({"transformer": {"recompute_granularity": "nonsense"}}, "Megatron-core refuses"),
        ({"optimizer": {"no_such_field": 1}}, "Megatron-core refuses"),
    ],
)
def test_settings_that_cannot_be_are_refused(workers, hf, passed, message):
    with pytest.raises(Failed, match=message) as failure:
        workers.start(config_of(hf("llama", True)[0], passthrough=passed))
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


# --- what each source of a push gathers out of Megatron's parts ---
def test_bf16_engines_get_rounded_weights_and_an_exact_bias(workers, hf):
    folder, _ = hf("glm4_moe", False)
    workers.start(config_of(folder), TrainerLayout(2, pp=2))
    found = pushed(workers.run(trainer_worker.gathered, "bfloat16"))
    assert any(map(is_bias, found))
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(found[name], tensor if is_bias(name) else tensor.bfloat16()), name


def test_engines_in_fp8_get_what_the_whole_weights_are_quantised_to(workers, hf):
    """Blocks reach over what the ranks have of a weight: both exports are equal to the last bit."""
    folder, _model = hf("deepseek_v3", False)
    whole = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    spec = BlockFp8((24, 40), ue8m0=False, names=frozenset(name for name in whole if name.endswith("_proj.weight")))
    workers.start(config_of(folder), TrainerLayout(2, tp=2, ep=2))
    answers = workers.run(trainer_worker.gathered, "bfloat16", spec)
    found, exported, want = pushed(answers), answers[0][2], dict(quantized(whole.items(), spec))
    assert found.keys() == exported.keys() == want.keys()
    for name, tensor in want.items():
        if is_bias(name):
            continue  # exact
        assert found[name].dtype == exported[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        for made in (found, exported):
            assert torch.equal(made[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name
