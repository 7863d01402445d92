"""The trainer's layout: Megatron's order of ranks; sizes that cannot be, or that the model does not divide into."""

import itertools
import re
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.models.shape import shape_from_hf_config
from fusionrl.plan.layout import RankCoordinates, TrainerLayout, model_errors, stage_layers
from fusionrl.plan.plan import plan_errors
from tests.models.test_families import shape_of
from tests.plan.shapes import SMALL

RAW: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 12, "hidden_size": 32, "intermediate_size": 66}
RAW |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 101}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "intermediate_size": 64}
LLAMA, MOE = shape_from_hf_config(RAW), shape_from_hf_config(RAW | EXPERTS | {"model_type": "qwen3_moe"})
DELTA, SINKS, LATENT = (shape_of(family) for family in ("qwen3_5_text", "gpt_oss", "deepseek_v3"))


def ends(**sizes: int) -> dict[str, int]:
    return {f"num_layers_in_{stage}_pipeline_stage": size for stage, size in sizes.items()}


def test_order_of_ranks_is_tp_cp_dp_pp():
    layout = TrainerLayout(24, tp=2, cp=2, pp=3)
    assert (layout.dp, layout.expert_dp) == (2, 8)
    places = itertools.product(range(3), range(2), range(2), range(2))
    expected = [RankCoordinates(tp=tp, cp=cp, dp=dp, pp=pp) for pp, dp, cp, tp in places]
    assert [layout.coordinates(rank) for rank in range(24)] == expected
    assert [layout.rank(coordinates) for coordinates in expected] == list(range(24))
    assert layout.ranks_of_dp(1) == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
    assert [layout.dp_rank(rank) for rank in (0, 3, 4, 23)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="rank 24 is not one of the 24 ranks"):
        layout.coordinates(24)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 4, "tp": 3}, "tp 3 × pp 1 × cp 1 does not divide"),
        ({"world_size": 4, "ep": 3}, "etp 1 × ep 3 × pp 1 does not divide"),
        ({"world_size": 4, "pp": 0}, "--pipeline-model-parallel-size is 0"),
        ({"world_size": 2, "vpp": 2}, "--virtual-pipeline-model-parallel-size 2 needs --pipeline-model-parallel-size"),
    ],
)
def test_sizes_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        TrainerLayout(**sizes)


@pytest.mark.parametrize(
    ("shape", "layout", "fields", "parts"),
    [
        (LLAMA, TrainerLayout(3, tp=3), {}, ["8 attention heads: 8 = 2 x 3 + 2", "4 key-value heads: 4 = 1 x 3 + 1"]),
        (LLAMA, TrainerLayout(8, tp=8), {}, ["4 key-value heads: 4 = 0 x 8 + 4", "66 rows of the MLP"]),
        (LLAMA, TrainerLayout(5, pp=5), {}, ["--pipeline-model-parallel-size 5: 12 layers = 12, which 5"]),
        (LLAMA, TrainerLayout(4, pp=4, vpp=2), {}, ["4 x 2 virtual stages: 12 layers = 12, which 8 does not divide"]),
        (LLAMA, TrainerLayout(2, ep=2), {}, ["--expert-model-parallel-size 2: a llama model has no experts"]),
        (MOE, TrainerLayout(4, ep=4), {}, ["--expert-model-parallel-size 4 does not divide the model's 6 experts"]),
        (MOE, TrainerLayout(4, tp=4, etp=4), {}, ["10 rows of an expert (moe_intermediate_size): 10 = 2 x 4 + 2"]),
        (LLAMA, TrainerLayout(4, pp=4), ends(first=2), ["3 further stages: 12 layers - "]),
        (LLAMA, TrainerLayout(2, pp=2, vpp=2), ends(first=5, last=7), ["first-pipeline-stage 5 does not", "stage 7"]),
        (MOE, TrainerLayout(2, tp=2, etp=2), {"sequence_parallel": False}, ["experts need sequence parallelism"]),
        (LLAMA, TrainerLayout(2, etp=2), {}, ["--expert-tensor-parallel-size 2: a llama model has no experts"]),
        (LLAMA, TrainerLayout(2, pp=2), {"account_for_loss_in_pipeline_split": True}, ["is not supported"]),
        (LLAMA, TrainerLayout(1), ends(last=7), ["of at least 2"]),
        (LLAMA, TrainerLayout(2, pp=2), ends(last=13), ["12 layers"]),
        (DELTA, TrainerLayout(4, tp=4), {}, ["2 key heads of delta nets: 2 = 0 x 4 + 2", "2 key-value heads"]),
        (
            DELTA,
            TrainerLayout(4, tp=2, cp=2),
            {},
            ["--context-parallel-size 2: with --tensor-model-parallel-size 2 it"],
        ),
        (DELTA, TrainerLayout(2, tp=2), {"sequence_parallel": False}, ["gated delta nets need sequence parallelism"]),
        (SINKS, TrainerLayout(2, cp=2), {}, ["layers of the kind window cannot", "attention with sinks cannot"]),
        (SINKS, TrainerLayout(2, tp=2, etp=2), {}, ["experts with biases stand whole on a rank; give 1"]),
        (LATENT, TrainerLayout(2, tp=2), {"sequence_parallel": False}, ["need sequence parallelism"]),
        (LLAMA, TrainerLayout(8, tp=2, pp=2, cp=2), {}, []),
        (LLAMA, TrainerLayout(3, pp=3, vpp=2), {}, []),
        (LLAMA, TrainerLayout(4, pp=4), ends(first=2, last=4), []),
        (LLAMA, TrainerLayout(2, pp=2), ends(first=5, last=7), []),
        (LLAMA, TrainerLayout(3, pp=3), ends(last=2), []),
        (MOE, TrainerLayout(6, ep=6), {}, []),
        (MOE, TrainerLayout(4, tp=2, ep=2, etp=2), {}, []),
    ],
)
def test_what_does_not_divide(shape, layout, fields, parts):
    found = model_errors(layout, shape, fields)
    assert len(found) == len(parts), found
    assert all(part in error for part, error in zip(parts, found, strict=True))


@pytest.mark.parametrize(
    ("layout", "fields", "stages"),
    [
        (TrainerLayout(2, pp=2), {}, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        (TrainerLayout(2, pp=2, vpp=3), {}, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
        (TrainerLayout(3, pp=3), ends(last=2), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]),
        (TrainerLayout(2, pp=2), {"pipeline_model_parallel_layout": "x"}, None),
    ],
)
def test_layers_of_stages(layout, fields, stages):
    assert stage_layers(layout, 12, fields) == stages


MODEL: dict[str, Any] = SMALL | {"model_type": "qwen3_moe", "num_hidden_layers": 12, "intermediate_size": 96}
MODEL |= {"num_attention_heads": 24, "num_key_value_heads": 12, "vocab_size": 101}
MODEL |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
SIZES = tuple(f"{kind}_model_parallel_size" for kind in ("tensor", "expert", "pipeline"))
SIZES += ("rollout_num_gpus_per_engine", "global_batch_size", "num_steps_per_rollout")


@pytest.mark.parametrize(
    ("flags", "size", "fitting"),
    [
        ({"tensor_model_parallel_size": 5, "actor_num_gpus_per_node": 5}, "tensor-model-parallel-size 5", 12),
        ({"expert_model_parallel_size": 4, "actor_num_gpus_per_node": 4}, "expert-model-parallel-size 4", 6),
        ({"pipeline_model_parallel_size": 5, "actor_num_gpus_per_node": 5}, "pipeline-model-parallel-size 5", 12),
        ({"tensor_model_parallel_size": 3, "actor_num_gpus_per_node": 8}, "tp 3 × pp 1 × cp 1", 8),
        ({"expert_model_parallel_size": 3, "actor_num_gpus_per_node": 8}, "etp 1 × ep 3 × pp 1", 8),
        ({"rollout_num_gpus": 9, "rollout_num_gpus_per_engine": 2}, "rollout-num-gpus-per-engine 2", 9),
        ({"rollout_batch_size": 6, "global_batch_size": 4}, "global-batch-size 4", 6),
        ({"rollout_batch_size": 6, "num_steps_per_rollout": 4}, "num-steps-per-rollout 4", 6),
    ],
)
def test_what_is_named_would_do(flags: dict[str, int], size: str, fitting: int) -> None:
    """Every message about a size ends in those that fit, and with each of them the message is gone."""
    found = [error for error in plan_errors(Config.from_flat(flags), 0, shape_from_hf_config(MODEL)) if size in error]
    assert found
    names = re.search(rf"sizes that divide (?:{fitting}|all that it splits): ([\d, and]+)", found[0])
    assert names is not None, found
    field = next(name for name in flags if name in SIZES)
    for text in re.findall(r"\d+", names[1]):
        again = plan_errors(Config.from_flat(flags | {field: int(text)}), 0, shape_from_hf_config(MODEL))
        assert not any(names[0].partition(":")[0] + ":" in error for error in again), (text, again)


@pytest.mark.parametrize("layout", [TrainerLayout(8, tp=2, pp=2), TrainerLayout(8, tp=2, pp=2, ep=2), TrainerLayout(4)])
def test_ranks_that_share_parameters(layout: TrainerLayout) -> None:
    """A smaller layout's rank finds all of its parameters there, and asks no rank of another pipeline stage."""
    smaller = layout.smaller(layout.world_size - 1)
    assert smaller is not None
    for rank in range(smaller.world_size):
        place, found = smaller.coordinates(rank), layout.with_parameters_of(smaller.holders(rank))
        others = {other: layout.coordinates(other) for other in range(layout.world_size)}
        assert all(others[other].pp == place.pp for other in found)
        assert {other for other, at in others.items() if (at.tp, at.pp) == (place.tp, place.pp)} <= set(found)
