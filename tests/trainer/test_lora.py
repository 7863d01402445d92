"""Adapters in every layout against PEFT's autograd on transformers, and what may keep them from learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import peft
import pytest
import torch

from fusionrl.models.rules import canonical_name
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.trained_parts import adapters_of
from tests.trainer import hf_models, trainer_worker
from tests.trainer.local_ranks import Failed
from tests.trainer.test_parity import assert_close
from tests.trainer.trainer_worker import Samples, config_of, draw_adapters
from tools.parity import MergedAdapters, all_logits
from tools.parity_rows import FULL, OVERLAP

ONE = TrainerLayout(1)
TP2, PP2, CP2, DP2 = (TrainerLayout(2, **sizes) for sizes in ({"tp": 2}, {"pp": 2}, {"cp": 2}, {}))
DENSE = {"first_k_dense_replace": 2}
STEPS = 3


class Peft:
    """The same three steps by PEFT itself, for models whose targets are linear modules of transformers."""

    def __init__(self, model: Any, names: list[str], spec: Any) -> None:
        modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in names}
        config = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            use_rslora=spec.use_rslora,
            target_modules=sorted(modules),
        )
        model.config.model_type = "dense"  # of a family that has mixtures, PEFT would look for packed experts
        self.model = peft.get_peft_model(model, config)
        self.matrices = {
            name.replace(".default", ""): param for name, param in self.model.named_parameters() if ".lora_" in name
        }
        assert sorted(self.matrices) == sorted(names)
        with torch.no_grad():
            for name, matrix in self.matrices.items():
                matrix.copy_(torch.from_numpy(trainer_worker.adapter_value(name, matrix.shape)))

    def merge(self) -> None: ...

    def take_gradients(self) -> dict[str, np.ndarray]:
        return {name: matrix.grad.numpy().copy() for name, matrix in self.matrices.items()}


_expected: dict[str, list[Any]] = {}


def expected(hf: Any, family: str, values: dict[str, Any], flags: dict[str, Any], by_peft: bool) -> list[Any]:
    """(loss, gradients) of each step, and the matrices after the last; layouts share them."""
    key = repr((family, values, flags))
    if key in _expected:
        return _expected[key]
    folder, model = hf(family, False, **values)
    shape = read_model_shape(folder)
    spec = adapters_of(config_of(folder, "sft", **flags), shape)
    assert spec is not None
    samples, merged = Samples(7, seed=4), MergedAdapters(hf_models.clone(model), shape, spec)
    reference = Peft(hf_models.clone(model), list(merged.matrices), spec) if by_peft else merged
    optimizer = torch.optim.AdamW(reference.matrices.values(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    steps: list[Any] = []
    for _ in range(STEPS):
        reference.model.zero_grad()
        loss = hf_models.loss(reference.model, samples, list(range(7)), "sft")
        loss.backward()
        steps.append((loss.item(), reference.take_gradients()))
        optimizer.step()
        reference.merge()
    _expected[key] = [*steps, {name: matrix.detach().numpy() for name, matrix in reference.matrices.items()}]
    return _expected[key]


RANK = {"lora_rank": 4}
CASES = [
    *(("qwen3", {}, RANK, layout, {}, True) for layout in (ONE, TP2, PP2, CP2)),
    ("qwen3", {}, RANK, DP2, {"ddp": OVERLAP}, True),
    ("qwen3", {}, RANK, TP2, {"transformer": {"sequence_parallel": False}}, True),
    ("qwen3", {}, RANK, TP2, {"transformer": FULL}, True),
    ("qwen3", {}, RANK | {"target_modules": ["q_proj", "v_proj", "up_proj"], "lora_use_rslora": True}, TP2, {}, True),
    ("phi3", {}, RANK, TP2, {}, True),
    *(("qwen3_moe", {}, RANK, TrainerLayout(2, **sizes), {}, False) for sizes in ({"ep": 2}, {"tp": 2}, {"etp": 2})),
    ("deepseek_v3", DENSE, RANK, TP2, {}, True),
    ("deepseek_v3", {}, RANK, TrainerLayout(2, ep=2), {}, False),
    ("qwen3_5_text", {}, RANK, TP2, {}, True),
]


@pytest.mark.parametrize(("family", "values", "flags", "layout", "passthrough", "by_peft"), CASES, ids=str)
def test_three_steps_equal_those_of_peft(workers, hf, family, values, flags, layout, passthrough, by_peft):
    """The gradient of each matrix, their norm, and Adam's steps; experts by merged weights, which PEFT has packed."""
    *steps, matrices = expected(hf, family, values, flags, by_peft)
    samples, bound = Samples(7, seed=4), 1e-4 if family == "qwen3_5_text" else 5e-6
    workers.start(config_of(hf(family, False, **values)[0], "sft", passthrough, **flags), layout)
    workers.run(draw_adapters)
    for number, (loss, gradients) in enumerate(steps):
        metrics = workers.train(samples.shards(layout.dp, micro=2), layout, number)
        assert metrics["train/loss"] == pytest.approx(loss, rel=2e-6)
        norm = np.sqrt(sum(float((gradient.astype(np.float64) ** 2).sum()) for gradient in gradients.values()))
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=10 * bound)
        # Adam blows up what rounding does to a gradient near 0, and the gradients after it show that.
        assert_close(workers.run(trainer_worker.gradients)[0], gradients, bound if number == 0 else 10 * bound)
    assert_close(workers.run(trainer_worker.adapters)[0], matrices, 10 * bound)


def test_a_run_begins_as_its_base_whose_log_probs_the_reference_has(workers, hf):
    """Bit by bit; the initial values are those of the seed and the name, in every layout."""
    folder, _ = hf("qwen3_moe", False)
    teacher_folder, teacher = hf("qwen3_moe", False, seed=5)
    samples, begun = Samples(6, seed=3), []
    for layout in (ONE, TP2, PP2, TrainerLayout(2, ep=2)):
        shards = samples.shards(layout.dp)
        workers.start(config_of(folder), layout)
        logits = workers.on_shards(all_logits, shards, [[0, 1]])
        scores = workers.on_shards("score", shards)
        workers.start(config_of(folder, use_kl_loss=True, kl_loss_coef=0.1, **RANK), layout)
        for got, want in zip(workers.on_shards(all_logits, shards, [[0, 1]]), logits, strict=True):
            assert (got is None and want is None) or all(map(np.array_equal, got, want))
        begun.append(workers.run(trainer_worker.adapters)[0])
        assert workers.train(shards)["train/kl_loss"] == 0.0
        changed, reference = workers.on_shards("score", shards), workers.on_shards("score", shards, "ref")
        assert all(map(np.array_equal, reference[0], scores[0]))
        assert not any(map(np.array_equal, changed[0], scores[0]))
    for name, matrix in begun[0].items():
        assert all(np.array_equal(other[name], matrix) for other in begun)
        largest = np.abs(matrix).max() * matrix.shape[1] ** 0.5
        assert largest == 0.0 if name.endswith(".lora_B.weight") else 0.9 < largest <= 1.0
    workers.start(config_of(folder, seed=7, **RANK))
    workers.run(draw_adapters)
    workers.call("read_weights", "teacher", str(teacher_folder), "--opd-teacher-load")
    scored = np.concatenate(workers.on_shards("score", samples.shards(), "teacher")[0])
    assert np.abs(scored - hf_models.all_log_probs(teacher, samples)).max() <= 1e-5


def test_experts_without_tokens(workers, hf):
    """Samples of two tokens, each alone in a micro-batch: most experts have none."""
    folder, model = hf("qwen3_moe", False, num_experts=8)
    samples = Samples(4, seed=2, low=2, high=4)
    spec = adapters_of(config_of(folder, "sft", **RANK), read_model_shape(folder))
    assert spec is not None
    merged = MergedAdapters(hf_models.clone(model), read_model_shape(folder), spec)
    hf_models.loss(merged.model, samples, list(range(4)), "sft").backward()
    want = merged.take_gradients()
    assert sum(not gradient.any() for name, gradient in want.items() if ".experts." in name) > 0
    for layout in (ONE, TrainerLayout(2, ep=2), TrainerLayout(2, tp=2)):
        workers.start(config_of(folder, "sft", **RANK), layout)
        workers.run(draw_adapters)
        workers.train(samples.shards(layout.dp, micro=1), layout)
        assert_close(workers.run(trainer_worker.gradients)[0], want, 5e-6)


def no_want(actor: Any, is_patched: bool) -> None:
    """Let frozen embeddings of models that are built from now on want no gradient; or want them again."""
    from fusionrl.trainer import model

    kept = vars(model).setdefault("_kept", model._want_gradients)
    model._want_gradients = (lambda modules: None) if is_patched else kept


def bypass(actor: Any) -> None:
    """Let the second layer's attention compute past its adapter."""
    layer = actor.trained.chunks[0].module.decoder.layers[1]
    layer.self_attention.linear_proj._forward_hooks.clear()


def test_adapters_that_would_learn_nothing_end_the_run(workers, hf):
    samples, flags = Samples(4, seed=2), RANK | {"target_modules": ["o_proj"]}
    some = FULL | {"recompute_method": "block"}  # of two layers one

    def take_three_steps() -> None:
        for step in range(3):
            workers.train(samples.shards(), None, step)

    def learn_nothing(message: str) -> None:
        with pytest.raises(Failed, match=message):
            take_three_steps()

    config = config_of(hf("qwen3", False)[0], "sft", **flags)
    workers.start(config)
    workers.run(bypass)
    learn_nothing(r"1 of 2 adapters have had no gradient, decoder.layers.1.self_attention.linear_proj")
    workers.run(no_want, True)
    try:
        for fields, message in ((FULL, "requires no gradient"), (some, r"1 of 2 adapters have had.*layers.0")):
            workers.start(config_of(hf("qwen3", False)[0], "sft", {"transformer": fields}, **flags))
            learn_nothing(message)
    finally:
        workers.run(no_want, False)
    # A step without a gradient proves nothing: no reward differs from the others.
    workers.start(config_of(hf("qwen3", False)[0], **flags))
    samples.rewards[:] = 0
    assert workers.train(samples.shards())["train/grad_norm"] == 0.0


def own_matrices(actor: Any) -> list[np.ndarray]:
    """This rank's parts, of A those that each rank has whole."""
    from fusionrl.trainer.lora import adapters

    found = [adapter for adapter in adapters(actor.trained.chunks) if adapter.by_rows]
    return [matrix.detach().numpy().copy() for adapter in found for matrix in adapter.A.parameters()]


@pytest.mark.parametrize(("family", "is_divided", "etp"), [("qwen3", False, 1), ("qwen3_moe", True, 2)])
def test_dropout(workers, hf, family, is_divided, etp):
    """It changes what is trained and no score; ranks that hold the same matrix train the same."""
    folder, samples = hf(family, False)[0], Samples(6, seed=3)
    passthrough = {"transformer": {"sequence_parallel": is_divided}}
    losses, scores = [], []
    for dropout in (0.0, 0.5):
        workers.start(
            config_of(folder, "sft", passthrough, **RANK, lora_dropout=dropout), TrainerLayout(2, tp=2, etp=etp)
        )
        workers.run(draw_adapters)
        scores.append(workers.call("score", samples.shards()[0])[0])
        losses.append(workers.train(samples.shards())["train/loss"])
    assert all(map(np.array_equal, *scores))
    assert abs(losses[1] - losses[0]) > 1e-3
    first, second = workers.run(own_matrices)
    assert first
    assert all(map(np.array_equal, first, second))


def test_bf16_keeps_what_it_learns_in_fp32(workers, hf):
    """Steps smaller than bf16 tells apart add up; gradients are near those of fp32."""
    folder, samples, gradients = hf("qwen3", False)[0], Samples(6, seed=3), []
    for precision in ("fp32", "bf16"):
        workers.start(config_of(folder, "sft", precision=precision, lr=2e-5, **RANK), TP2)
        workers.run(draw_adapters)
        before = workers.run(trainer_worker.adapters)[0]
        workers.train(samples.shards(), TP2)
        gradients.append(workers.run(trainer_worker.gradients)[0])
    assert_close(gradients[1], gradients[0], 0.1)
    for step in range(1, 12):
        workers.train(samples.shards(), TP2, step)
    after = workers.run(trainer_worker.adapters)[0]
    for name in (name for name in before if name.endswith(".lora_B.weight")):
        is_coarse = np.abs(before[name]) > 1 / 64  # where the least change is three steps
        assert (after[name] != before[name])[is_coarse].mean() > 0.3, name


def grouped(actor: Any) -> tuple[float, float]:
    """Largest differences of a layer that computes all experts at once: to each by itself, and of gradients."""
    from fusionrl.trainer.lora import GroupedAdapter

    experts = actor.trained.chunks[0].module.decoder.layers[0].mlp.experts.local_experts
    splits, worst = [5, 0, 3, 1], [0.0, 0.0]
    for name in ("linear_fc1", "linear_fc2"):
        each = [getattr(expert, name).adapter for expert in experts]
        parameters = [parameter for adapter in each for parameter in adapter.parameters()]
        rows = torch.randn(sum(splits), each[0].A.get_parameter("0").size(1), generator=torch.Generator())
        outs = [
            torch.cat([adapter(part) for adapter, part in zip(each, rows.split(splits), strict=True)]),
            GroupedAdapter(each)(rows, splits),
        ]
        grads = [torch.autograd.grad(out.square().sum(), parameters) for out in outs]
        worst[0] = max(worst[0], float((outs[1] - outs[0]).detach().abs().max()))
        worst[1] = max(worst[1], *(float((b - a).abs().max()) for a, b in zip(*grads, strict=True)))
    return worst[0], worst[1]


@pytest.mark.parametrize("rank", [4, 3])  # of one that kernels take, and one that they do not
def test_all_experts_at_once(workers, hf, rank):
    """As in Transformer Engine's layers, which have other names."""
    workers.start(config_of(hf("qwen3_moe", False)[0], "sft", lora_rank=rank))
    workers.run(draw_adapters)
    assert max(workers.run(grouped)[0]) <= 1e-6
    name = "decoder.layers.0.mlp.experts.linear_fc1.adapter.3.A.0"
    assert canonical_name(name, 4, 8) == "decoder.layers.4.mlp.experts.local_experts.11.linear_fc1.adapter.A.0"


def behind_norm(actor: Any, has_bias: bool) -> bool:
    """Whether a layer like Transformer Engine's with a norm in it gives its adapter the normed input."""
    from fusionrl.trainer.lora import _add, adapters_off

    class NormedLinear(torch.nn.Module):
        return_layernorm_output = True

        def forward(self, rows: Any) -> Any:
            out, normed = rows[:, :32] + 1, rows * 2
            return (out, "bias", normed) if has_bias else ((out, normed), None)

    layer = NormedLinear()
    layer.adapter = adapter = actor.trained.chunks[0].module.decoder.layers[0].self_attention.linear_proj.adapter
    layer.register_forward_hook(_add)
    rows = torch.randn(3, 64)
    out, bias = layer(rows)
    with adapters_off([layer]):
        plain = layer(rows)
    as_it_should = torch.equal(out, rows[:, :32] + 1 + adapter(rows * 2)) and not torch.equal(out, plain[0])
    return (
        as_it_should and bias == plain[1] == ("bias" if has_bias else None) and torch.equal(plain[0], rows[:, :32] + 1)
    )


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_norm_that_is_a_part_of_the_layer(workers, hf, has_bias):
    workers.start(config_of(hf("qwen3", False)[0], "sft", **RANK))
    workers.run(draw_adapters)
    assert workers.run(behind_norm, has_bias) == [True]
