"""What each source of a push gathers out of Megatron's parts, against the model that was read."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fusionrl.models.fp8 import quantized
from fusionrl.models.quantization import BlockFp8
from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.plan.push import plan_push, push_tensors, stage_of_rule
from tests.trainer.trainer_worker import config_of

TWO = TrainerLayout(2, tp=2)
MAX_BYTES = 3_000


def gathered(
    actor: Any, dtype: str, quantization: BlockFp8 | None = None
) -> tuple[dict[str, torch.Tensor], list[str], dict[str, torch.Tensor]]:
    """Name → tensor, of the buckets that this rank is the source of; every tensor's name, stage and size; and the whole
    export."""
    import torch.distributed as dist

    from fusionrl.weights.export import Exporter
    from fusionrl.weights.gather import convert_in_place, views_of

    trained = actor.trained
    exporter = Exporter(
        trained.chunks,
        trained.transformer,
        actor.shape,
        actor.layout,
        actor.rank,
        dtype,
        actor.device,
        quantization=quantization,
    )
    exporter.settle()
    tensors = exporter.tensors(dist.group.WORLD)
    experts = actor.shape.moe.num_experts if actor.shape.moe else 0
    plan = plan_push(tensors, actor.layout, 1, MAX_BYTES, experts)
    gatherer, found = exporter.gatherer(plan, {}), {}
    flat = torch.full((plan.buffer_bytes(actor.rank)[0],), 255, dtype=torch.uint8)  # what is not written is a NaN
    early, late = plan.gathers(actor.rank)
    for bucket in early + late:
        gatherer.gather(bucket, flat if bucket.source == actor.rank else None)
        if bucket.source == actor.rank:
            parts = views_of(bucket, flat)
            if bucket.is_quantised:
                parts = convert_in_place(parts, flat, partial(quantized, spec=quantization))
            assert sum(view.nbytes for _, _, view in parts) == bucket.sent_bytes
            found |= {name: view.clone() for _, name, view in parts}
    return found, [f"{t.name} {t.stage} {t.nbytes}" for t in tensors], dict(exporter.whole())


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        ("llama", False, TrainerLayout(1)),
        ("qwen2", True, TWO),
        ("qwen3", False, TrainerLayout(2, cp=2)),
        ("glm4", False, TWO),
        ("qwen2_moe", False, TrainerLayout(2, ep=2)),
        ("qwen3_moe", False, TrainerLayout(2, tp=2, etp=2)),
        ("qwen3_moe", False, TrainerLayout(2, tp=2, ep=2)),
        ("mixtral", False, TrainerLayout(2, pp=2)),
        ("deepseek_v3", False, TrainerLayout(2, tp=2)),
    ],
    ids=str,
)
def test_the_sources_together_have_every_tensor_once(workers, hf, family, tied, layout):
    folder, _model = hf(family, tied, vocab_size=121)
    workers.start(config_of(folder), layout)
    answers = workers.run(gathered, "float32")
    found = {name: tensor for part, _, _ in answers for name, tensor in part.items()}
    assert len(found) == sum(len(part) for part, _, _ in answers), "one tensor of two sources"
    if layout.pp * layout.ep > 1:
        assert all(part for part, _, _ in answers), "the work is not spread"
    from safetensors.torch import load_file

    want = load_file(folder / "model.safetensors")
    if tied:
        want.pop("lm_head.weight", None)
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, want[name]), name
    # The plan that is shown before anything runs is the one that is made of what the ranks hold.
    from fusionrl.models.shape import read_model_shape

    shape = read_model_shape(folder)
    stages = stage_layers(layout, shape.num_layers, {})
    assert stages is not None
    told = push_tensors(shape, stage_of_rule(stages), "float32")
    assert [f"{t.name} {t.stage} {t.nbytes}" for t in told] == answers[0][1]


def test_bf16_engines_get_rounded_weights_and_an_exact_bias(workers, hf):
    folder, model = hf("glm4_moe", False)
    workers.start(config_of(folder), TrainerLayout(2, pp=2))
    found = {name: tensor for part, _, _ in workers.run(gathered, "bfloat16") for name, tensor in part.items()}
    for name, param in model.named_parameters():
        if name in found:  # transformers holds experts in other shapes than its files do
            assert torch.equal(found[name], param.bfloat16()), name
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    assert biases and all(torch.equal(found[name], buffer) for name, buffer in biases.items())


def test_engines_in_fp8_get_what_the_whole_weights_are_quantised_to(workers, hf):
    """Blocks reach over what the ranks have of a weight: both exports are equal to the last bit."""
    folder, _model = hf("deepseek_v3", False)
    from safetensors.torch import load_file

    whole = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    spec = BlockFp8((24, 40), ue8m0=False, names=frozenset(name for name in whole if name.endswith("_proj.weight")))
    workers.start(config_of(folder), TrainerLayout(2, tp=2, ep=2))
    answers = workers.run(gathered, "bfloat16", spec)
    found = {name: tensor for part, _, _ in answers for name, tensor in part.items()}
    want = dict(quantized(whole.items(), spec))
    exported = answers[0][2]
    assert found.keys() == exported.keys() == want.keys()
    for name, tensor in want.items():
        if name.endswith("correction_bias"):
            continue  # exact
        assert found[name].dtype == exported[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        for made in (found[name], exported[name]):
            assert torch.equal(made.contiguous().view(torch.uint8), tensor.view(torch.uint8)), name
