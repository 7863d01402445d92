"""Layouts that the model does not divide into are refused, with the arithmetic."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.plan.layout import TrainerLayout, model_errors, stage_layers

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "hidden_size": 32,
    "intermediate_size": 66,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 101,
}
MOE: dict[str, Any] = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "intermediate_size": 64,
}


def shape(raw: dict[str, Any]) -> ModelShape:
    return shape_from_hf_config(json.loads(json.dumps(raw)))


@pytest.mark.parametrize(
    ("raw", "layout", "fields", "parts"),
    [
        (LLAMA, TrainerLayout(3, tp=3), {}, ["8 attention heads: 8 = 2 x 3 + 2", "4 key-value heads: 4 = 1 x 3 + 1"]),
        (LLAMA, TrainerLayout(8, tp=8), {}, ["4 key-value heads: 4 = 0 x 8 + 4", "66 rows of the MLP"]),
        (LLAMA, TrainerLayout(5, pp=5), {}, ["--pipeline-model-parallel-size 5: 12 layers = 12, which 5"]),
        (LLAMA, TrainerLayout(4, pp=4, vpp=2), {}, ["4 x 2 virtual stages: 12 layers = 12, which 8 does not divide"]),
        (LLAMA, TrainerLayout(2, ep=2), {}, ["--expert-model-parallel-size 2: a llama model has no experts"]),
        (MOE, TrainerLayout(4, ep=4), {}, ["--expert-model-parallel-size 4 does not divide the model's 6 experts"]),
        (MOE, TrainerLayout(4, tp=4, etp=4), {}, ["10 rows of an expert (moe_intermediate_size): 10 = 2 x 4 + 2"]),
        (
            LLAMA,
            TrainerLayout(4, pp=4),
            {"num_layers_in_first_pipeline_stage": 2},
            ["3 further stages: 12 layers - --num-layers-in-first-pipeline-stage 2 = 10, which 3 does not divide"],
        ),
        (
            LLAMA,
            TrainerLayout(2, pp=2, vpp=2),
            {"num_layers_in_first_pipeline_stage": 5, "num_layers_in_last_pipeline_stage": 7},
            ["--num-layers-in-first-pipeline-stage 5 does not divide into 2 virtual", "last-pipeline-stage 7"],
        ),
        (MOE, TrainerLayout(2, tp=2, etp=2), {"sequence_parallel": False}, ["experts need sequence parallelism"]),
        (LLAMA, TrainerLayout(2, etp=2), {}, ["--expert-tensor-parallel-size 2: a llama model has no experts"]),
        (LLAMA, TrainerLayout(2, pp=2), {"account_for_loss_in_pipeline_split": True}, ["is not supported"]),
        (LLAMA, TrainerLayout(1), {"num_layers_in_last_pipeline_stage": 7}, ["of at least 2"]),
        (LLAMA, TrainerLayout(2, pp=2), {"num_layers_in_last_pipeline_stage": 13}, ["12 layers"]),
    ],
)
def test_what_does_not_divide(raw, layout, fields, parts):
    found = model_errors(layout, shape(raw), fields)
    assert len(found) == len(parts), found
    for part, error in zip(parts, found, strict=True):
        assert part in error


@pytest.mark.parametrize(
    ("raw", "layout", "fields"),
    [
        (LLAMA, TrainerLayout(8, tp=2, pp=2, cp=2), {}),
        (LLAMA, TrainerLayout(3, pp=3, vpp=2), {}),
        (
            LLAMA,
            TrainerLayout(4, pp=4),
            {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 4},
        ),
        (
            LLAMA,
            TrainerLayout(2, pp=2),
            {"num_layers_in_first_pipeline_stage": 5, "num_layers_in_last_pipeline_stage": 7},
        ),
        (LLAMA, TrainerLayout(3, pp=3), {"num_layers_in_last_pipeline_stage": 2}),
        (MOE, TrainerLayout(6, ep=6), {}),
        (MOE, TrainerLayout(4, tp=2, ep=2, etp=2), {}),
    ],
)
def test_what_does(raw, layout, fields):
    assert model_errors(layout, shape(raw), fields) == []


def test_interleaving_wants_stages():
    with pytest.raises(
        ValueError, match=r"--virtual-pipeline-model-parallel-size 2 needs --pipeline-model-parallel-size"
    ):
        TrainerLayout(2, vpp=2)


@pytest.mark.parametrize(
    ("layout", "fields", "stages"),
    [
        (TrainerLayout(2, pp=2), {}, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        (TrainerLayout(2, pp=2, vpp=3), {}, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
        (
            TrainerLayout(3, pp=3),
            {"num_layers_in_last_pipeline_stage": 2},
            [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]],
        ),
        (TrainerLayout(2, pp=2), {"pipeline_model_parallel_layout": "x"}, None),
    ],
)
def test_layers_of_stages(layout, fields, stages):
    assert stage_layers(layout, 12, fields) == stages
