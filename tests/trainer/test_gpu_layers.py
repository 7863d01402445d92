"""Kinds of layers by the kernels of a GPU, in bf16: Transformer Engine's windows and sinks, the delta rule of FLA."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusionrl.cli.device import detect_device
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.trained_parts import adapters_of
from tests.trainer import hf_models, trainer_worker
from tests.trainer.trainer_worker import Samples, config_of, draw_adapters
from tools.parity import MergedAdapters
from tools.proof.machine import has_package

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(detect_device("auto") != "cuda", reason="no NVIDIA GPU on this machine"),
]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": 128}
DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 32}
ROPE = {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}}
FAMILIES = {"qwen3": {}, "gemma3_text": {}, "olmo3": ROPE, "gpt_oss": {}, "qwen3_5_text": DELTA, "qwen3_next": DELTA}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_loss_are_near_those_of_transformers(workers, hf, family):
    """bf16 against fp32; a window, a sink or a state that is left out changes log-probs by more than 0.5."""
    folder, model = hf(family, False, **WIDE, **FAMILIES[family])
    samples = Samples(6, seed=3)
    workers.start(config_of(folder, "sft", precision="bf16"))
    (shard,) = samples.shards(micro=3)
    scored = np.concatenate(workers.call("score", shard)[0])
    assert np.abs(scored - hf_models.all_log_probs(model, samples)).mean() <= 0.05
    trained = hf_models.clone(model)
    loss = hf_models.loss(trained, samples, list(range(6)), "sft")
    loss.backward()
    norm = np.sqrt(sum(float(p.grad.pow(2).sum()) for p in trained.parameters() if p.grad is not None))
    metrics = workers.train([shard])
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=0.02)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=0.1)


@pytest.mark.parametrize(("family", "sizes"), [("qwen3", {}), ("qwen3_moe", {"moe_intermediate_size": 64})])
def test_adapters_have_the_gradients_of_transformers(workers, hf, family, sizes):
    """In layers whose norm is a part of the projection, and in those that compute all experts at once."""
    folder, model = hf(family, False, **WIDE, **sizes)
    config, samples = config_of(folder, "sft", precision="bf16", lora_rank=8), Samples(6, seed=3)
    shape = read_model_shape(folder)
    spec = adapters_of(config, shape)
    assert spec is not None
    merged = MergedAdapters(hf_models.clone(model), shape, spec)
    hf_models.loss(merged.model, samples, list(range(6)), "sft").backward()
    workers.start(config)
    workers.run(draw_adapters)
    workers.train(samples.shards(micro=3))
    gradients = workers.run(trainer_worker.gradients)[0]
    for name, want in merged.take_gradients().items():
        assert np.linalg.norm(gradients[name] - want) <= 0.2 * np.linalg.norm(want) + 1e-3, name


def test_delta_nets_in_fp32_take_no_kernels(workers, hf):
    """flash-linear-attention refuses fp32."""
    folder, model = hf("qwen3_5_text", False, **WIDE, **DELTA)
    samples = Samples(6, seed=3)
    workers.start(config_of(folder, "sft", precision="fp32"))
    scored = np.concatenate(workers.call("score", samples.shards(micro=3)[0])[0])
    assert np.abs(scored - hf_models.all_log_probs(model, samples)).max() <= 1e-3


@pytest.mark.skipif(not has_package("fla"), reason="needs flash-linear-attention")
@pytest.mark.parametrize("lengths", [(1, 63, 64, 65), (500, 3)], ids=str)
def test_the_delta_rule_of_kernels_is_ours(lengths: tuple[int, ...]) -> None:
    from fusionrl.trainer.gated_delta import Chunks, by_kernels, delta_rule

    random, device = torch.Generator("cuda").manual_seed(1), torch.device("cuda")
    sizes = (sum(lengths), 4, 64)
    query, key, value = (torch.randn(sizes, generator=random, device=device) for _ in range(3))
    decay, beta = (torch.rand(sizes[:2], generator=random, device=device) for _ in range(2))
    tensors = [F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, -decay, beta]
    tensors = [x.bfloat16().float().requires_grad_() for x in tensors]
    weights = torch.randn(sizes, generator=random, device=device)
    exact = delta_rule(*tensors, Chunks.of(lengths, device))
    found = by_kernels(*(x.bfloat16() for x in tensors[:3]), *tensors[3:], lengths)
    assert (found.float() - exact).norm() <= 0.02 * exact.norm()
    wanted = torch.autograd.grad((exact * weights).sum(), tensors)
    for ours, theirs in zip(torch.autograd.grad((found.float() * weights).sum(), tensors), wanted, strict=True):
        assert (ours - theirs).norm() <= 0.03 * theirs.norm()
