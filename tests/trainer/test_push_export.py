"""What each source of a push gathers out of Megatron's parts, against the model that was read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.weights.plan import EngineTarget, plan_push, push_tensors, stage_of_name
from tests.trainer.trainer_worker import config_of

TWO = TrainerLayout(2, tp=2)
MAX_BYTES = 3_000


def gathered(actor: Any, dtype: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Name → tensor, of the buckets that this rank is the source of; and every tensor's name, stage and size."""
    import torch.distributed as dist

    from fusionrl.weights.export import Exporter
    from fusionrl.weights.gather import views_of

    trained = actor.trained
    exporter = Exporter(trained.chunks, trained.transformer, actor.shape, actor.layout, actor.rank, dtype, actor.device)
    exporter.settle()
    tensors = exporter.tensors(dist.group.WORLD)
    target = EngineTarget(0, None, "", (0,))
    experts = actor.shape.moe.num_experts if actor.shape.moe else 0
    plan = plan_push(tensors, actor.layout, [target], [""] * 2, MAX_BYTES, experts, by_node=False)
    gatherer, found = exporter.gatherer(plan, {}), {}
    flat = torch.full((plan.buffer_bytes(actor.rank)[0],), 255, dtype=torch.uint8)  # what is not written is a NaN
    early, late = plan.gathers(actor.rank)
    for bucket in early + late:
        gatherer.gather(bucket, flat if bucket.source == actor.rank else None)
        if bucket.source == actor.rank:
            found |= {name: view.clone() for _, name, view in views_of(bucket, flat)}
    return found, [f"{t.name} {t.stage} {t.nbytes}" for t in tensors]


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        ("llama", False, TrainerLayout(1)),
        ("qwen2", True, TWO),
        ("qwen2", True, TrainerLayout(2, pp=2)),
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
    found = {name: tensor for part, _ in answers for name, tensor in part.items()}
    assert len(found) == sum(len(part) for part, _ in answers), "one tensor of two sources"
    if layout.pp * layout.ep > 1:
        assert all(part for part, _ in answers), "the work is not spread"
    from safetensors.torch import load_file

    want = load_file(folder / "model.safetensors")
    if tied:
        want.pop("lm_head.weight", None)
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, want[name]), name
    # The plan that is shown before anything runs is the one that is made of what the ranks hold.
    from fusionrl.config.model_shape import read_model_shape

    shape = read_model_shape(folder)
    stages = stage_layers(layout, shape.num_layers, {})
    assert stages is not None
    told = push_tensors(shape, stage_of_name(stages), "float32")
    assert [f"{t.name} {t.stage} {t.nbytes}" for t in told] == answers[0][1]


def test_bf16_engines_get_rounded_weights_and_an_exact_bias(workers, hf):
    folder, model = hf("glm4_moe", False)
    workers.start(config_of(folder), TrainerLayout(2, pp=2))
    found = {name: tensor for part, _ in workers.run(gathered, "bfloat16") for name, tensor in part.items()}
    for name, param in model.named_parameters():
        if name in found:  # transformers holds experts in other shapes than its files do
            assert torch.equal(found[name], param.bfloat16()), name
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    assert biases and all(torch.equal(found[name], buffer) for name, buffer in biases.items())
