"""Engines that only evaluate (--eval-num-gpus) or that others have started; what --in-process refuses."""

import itertools
from typing import Any

import pytest

from fusionrl.checks.model import engine_size_errors, unserved_errors
from fusionrl.checks.modes import eval_engine_errors, guest_errors, in_process_errors
from fusionrl.checks.validate import effect_errors
from fusionrl.config.config import Config
from fusionrl.config.parser import read_args
from fusionrl.pipeline.knobs import PIPELINES
from tests.models.test_families import shape_of

FITS: dict[str, Any] = {"eval_num_gpus": 1, "eval_prompt_data": ["a", "a.jsonl"], "eval_interval": 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "eval"}, "in --mode eval all engines evaluate; give --rollout-num-gpus"),
        ({"mode": "sft"}, "has no effect in --mode sft"),
        ({"mode": "reject-sampling"}, "has no effect in --mode reject-sampling"),
        ({"debug_rollout_only": True}, "has no effect in --mode rl --debug-rollout-only"),
        ({"debug_train_only": True}, "has no effect in --mode rl --debug-train-only"),
        ({"colocate": True}, "with --colocate"),
        ({"eval_prompt_data": [], "eval_interval": None}, "without --eval-prompt-data or --eval-config"),
        ({"eval_interval": None, "skip_eval_before_train": True}, "without --eval-interval"),
        ({"update_weight_transport": "ipc"}, "--update-weight-transport ipc"),
        ({"keep_checkpoints": 1, "keep_best": "eval/a/accuracy"}, "too late for --keep-best eval/a/accuracy"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    config = Config.from_flat(FITS | changes)
    (error,) = eval_engine_errors(config) + effect_errors(config)
    assert error.startswith("--eval-num-gpus 1") and said in error


def test_every_pipeline_and_transport_takes_it() -> None:
    for pipeline, transport in itertools.product(PIPELINES, ("auto", "broadcast", "disk")):
        config = Config.from_flat(FITS | {"pipeline": pipeline, "update_weight_transport": transport})
        assert eval_engine_errors(config) == [], (pipeline, transport)


@pytest.mark.parametrize("text", ["role=prefill", "role= prefill"])
def test_pairs_take_no_guests_however_the_group_is_written(text: str) -> None:
    groups = [f"a:num_gpus=1,{text}", "b:num_gpus=1,role=decode"]
    values = {"rollout_external_engine_addrs": ["h:1"], "engine_group": groups}
    (error,) = guest_errors(Config.from_flat(values))
    assert "not with --engine-group of role prefill" in error
    groups[:] = ["a:num_gpus=1,served-model-name=role=prefill"]
    assert guest_errors(Config.from_flat(values)) == []


def test_a_run_has_an_engine_of_its_own() -> None:
    config, errors = read_args(["--rollout-num-gpus", "0", "--rollout-external-engine-addrs", "h:1"])
    (error,) = errors
    assert error.startswith("--rollout-num-gpus 0: ") and "give 1 or more" in error
    assert config.cluster.rollout_num_gpus is None
    assert read_args(["--rollout-num-gpus", "2"])[0].cluster.rollout_num_gpus == 2


def test_one_rank_without_ray_is_fine() -> None:
    for values in ({"in_process": True, "pdb": True}, {"actor_num_gpus_per_node": 8}):
        assert in_process_errors(Config.from_flat(values)) == []


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"actor_num_gpus_per_node": 2}, "one trainer rank, not 2; give --actor-num-nodes 1"),
        ({"advantage_estimator": "ppo"}, "--advantage-estimator ppo trains a critic"),
        ({"pipeline": "async"}, "--pipeline async generates while it trains"),
        ({"ray_address": "10.0.0.1:6379"}, "--ray-address 10.0.0.1:6379 has no effect with --in-process; leave it out"),
        ({"async_save": True}, "--async-save has no effect with --in-process; leave it out"),
        ({"use_fault_tolerance": True}, "--use-fault-tolerance has no effect with --in-process; leave it out"),
        ({"dashboard": True}, "--dashboard has no effect with --in-process; leave it out"),
        ({"eval_num_gpus": 1}, "--eval-num-gpus 1 has no effect with --in-process; leave it out"),
    ],
)
def test_what_one_process_cannot_do(values: dict[str, Any], part: str) -> None:
    config = Config.from_flat({"in_process": True} | values)
    (error,) = in_process_errors(config) + effect_errors(config)
    assert part in error
    is_alone = "actor_num_gpus_per_node" in values or "pipeline" in values
    assert is_alone == ("--save-debug-rollout-data" in error), "its rollouts may be replayed in one process"
    assert in_process_errors(Config.from_flat(values)) == []


def test_engines_serve_no_mixture_with_dense_layers_between() -> None:
    """SGLang would look for experts in each layer, and end when it is started."""
    dense, mixed = shape_of("qwen2_moe"), shape_of("qwen2_moe", decoder_sparse_step=1)
    rl, sft = (Config.from_flat({"mode": mode, "hf_checkpoint": "/m"}) for mode in ("rl", "sft"))
    (error,) = unserved_errors(rl, dense)
    assert error.startswith("--hf-checkpoint /m: decoder_sparse_step") and "--mode sft" in error
    (error,) = unserved_errors(rl, shape_of("qwen3_moe", mlp_only_layers=[0]))
    assert "mlp_only_layers" in error
    (error,) = unserved_errors(rl, shape_of("gemma3_text"))
    assert "SGLang computes Gemma 3 by its embedding" in error
    assert unserved_errors(rl, shape_of("gemma3_text", tied=True)) == []
    (error,) = unserved_errors(rl, shape_of("glm4_moe_lite", mlp_layer_types=["sparse", "dense"]))
    assert "SGLang has dense layers first" in error
    (error,) = unserved_errors(rl, shape_of("qwen3_next", layer_types=["full_attention", "linear_attention"]))
    assert "SGLang gives attention to every so many layers" in error
    assert unserved_errors(sft, dense) == unserved_errors(rl, mixed) == unserved_errors(rl, shape_of("llama")) == []


def test_an_engine_divides_heads_of_delta_nets_and_copies_those_of_keys() -> None:
    config = Config.from_flat({"rollout_num_gpus_per_engine": 4})
    (error,) = engine_size_errors(config, shape_of("qwen3_5_text"))
    assert error.startswith("--rollout-num-gpus-per-engine 4 does not divide the model's 2 key heads of delta nets;")
    assert engine_size_errors(config, shape_of("qwen3")) == []
