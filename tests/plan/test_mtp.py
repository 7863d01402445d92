"""The plan of a run that trains layers of multi-token prediction."""

from typing import Any

import pytest

from fusionrl.config.config import Config, PassThrough
from fusionrl.models.families import hf_shapes
from fusionrl.models.shape import ModelShape, shape_difference, shape_from_hf_config
from fusionrl.plan.costs import SequenceCost
from fusionrl.plan.layout import TrainerLayout, mtp_errors
from fusionrl.plan.memory.states import stage_parameters
from fusionrl.plan.plan import Plan, make_plan
from tests.plan.shapes import SMALL

GLM: dict[str, Any] = SMALL | {
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
PLAIN = shape_from_hf_config(GLM)
SHAPE = PLAIN.with_mtp(1)


def plan(shape: ModelShape = SHAPE, sglang: Any = None, **values: Any) -> Plan:
    passed = PassThrough(sglang=sglang or {})
    base = {"rollout_batch_size": 8, "num_rollout": 3, "enable_mtp_training": True}
    return make_plan(Config.from_flat(base | values, passed), shape, device="cuda", num_prompts=8)


def test_engines_that_draft_with_the_layer_get_it_and_others_do_not() -> None:
    drafting = plan(sglang={"speculative_algorithm": "EAGLE"})
    assert drafting.pushed_shape == SHAPE
    assert drafting.push_bytes - plan().push_bytes == 2 * (SHAPE.num_parameters - PLAIN.num_parameters) + 4 * 4
    group = "drafts:num_gpus=1,speculative_algorithm=NEXTN"
    assert plan(engine_group=[group], rollout_num_gpus=1).drafts
    other = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "draft"}
    for sglang in ({}, {"speculative_algorithm": "NGRAM"}, other):
        assert plan(sglang=sglang).pushed_shape == PLAIN
    assert plan(PLAIN).push_bytes == plan().push_bytes


@pytest.mark.parametrize("estimator", ["ppo", "prime"])
def test_a_critic_has_none(estimator: str) -> None:
    """Nor has its checkpoint: a resume compares the shapes."""
    trained = plan(advantage_estimator=estimator).auxiliary
    assert trained is not None and trained.shape.mtp_layers == 0


def test_names_are_the_familys() -> None:
    added = hf_shapes(SHAPE).keys() - hf_shapes(PLAIN).keys()
    assert added and all(name.startswith(f"model.layers.{PLAIN.num_layers}.") for name in added)
    with pytest.raises(ValueError, match="--enable-mtp-training: a qwen3 model has no such layers here"):
        shape_from_hf_config(SMALL).with_mtp(1)
    with pytest.raises(ValueError, match="--mtp-num-layers 9: a glm4_moe model has at most 8"):
        PLAIN.with_mtp(9)
    told = shape_difference("here", PLAIN.model_dump(mode="json"), SHAPE)
    assert told is not None and "it has 0 layers of multi-token prediction, this run 1" in told
    assert not SHAPE.may_share_prompts and SHAPE.trunk == PLAIN


def test_the_last_stage_has_the_layer_and_a_copy_of_the_embedding() -> None:
    layout, stages = TrainerLayout(2, pp=2), [[0, 1], [2, 3]]
    (first, last), plain = (stage_parameters(shape, layout, stages) for shape in (SHAPE, PLAIN))
    table = SMALL["vocab_size"] * SMALL["hidden_size"]
    assert first.count == plain[0].count and first.shared == last.shared == (table,)
    assert last.count - plain[1].count == SHAPE.num_parameters - PLAIN.num_parameters + table
    costs = [SequenceCost.of_shape(shape) for shape in (SHAPE, PLAIN)]
    assert costs[0].linear > costs[1].linear and costs[0].quadratic == pytest.approx(costs[1].quadratic * 5 / 4)
    values = {"actor_num_gpus_per_node": 2, "pipeline_model_parallel_size": 2, "no_save": True}
    bars = [
        [bar.total for bar in memory.device_bars]
        for shape in (SHAPE, PLAIN)
        if (memory := plan(shape, **values).memory)
    ]
    assert max(bars[0]) > max(bars[1])


@pytest.mark.parametrize(
    ("values", "passed", "told"),
    [
        ({"loss_type": "custom_loss", "custom_loss_function_path": "a.b"}, {}, "--loss-type custom_loss"),
        ({"custom_spec_path": "a.b"}, {}, "--custom-spec-path"),
        ({}, {"transformer": {"pipeline_model_parallel_layout": "E|t"}}, "--pipeline-model-parallel-layout"),
        ({}, {"ddp": {"overlap_grad_reduce": True}}, "--overlap-grad-reduce"),
        ({}, {}, "tied embeddings"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(values: Any, passed: Any, told: str) -> None:
    config = Config.from_flat(values, PassThrough(**passed))
    shape = SHAPE.model_copy(update={"tie_word_embeddings": told == "tied embeddings"})
    (error,) = mtp_errors(config, TrainerLayout(2, pp=2), shape)
    assert error.startswith("--enable-mtp-training with ") and told in error
    assert mtp_errors(config, TrainerLayout(2, pp=2), shape.trunk) == []
