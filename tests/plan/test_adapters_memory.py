"""What the plan says of adapters: parameters, optimizer, pushes, and the memory that they leave."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import Config, PassThrough
from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.models.trainable import AdapterSpec, adapter_rules, num_adapter_parameters
from fusionrl.plan.devices import GIB, Machine
from fusionrl.plan.memory.report import training_bytes
from fusionrl.plan.memory.states import served_bytes
from fusionrl.plan.plan import Plan, make_plan
from fusionrl.plan.render import render_plan
from fusionrl.plan.trained_parts import adapter_push, adapter_slots, frozen_of
from fusionrl.plan.trainer_plan import auxiliary_config
from tests.clock import here_s
from tests.plan.shapes import SMALL

TINY = shape_from_hf_config(SMALL)
QUICKSTART = shape_from_hf_config(
    SMALL | {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "vocab_size": 64}
)
RAW_30B = json.loads((Path(__file__).parent / "qwen3_30b_a3b.json").read_text())
QWEN3_30B = shape_from_hf_config(RAW_30B)
SIZES_235B = {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536}
QWEN3_235B = shape_from_hf_config(RAW_30B | SIZES_235B)
SIZES_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
SIZES_8B |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
QWEN3_8B = shape_from_hf_config(SMALL | SIZES_8B)
H100, LAPTOP = Machine("cuda", "H100", device_memory=79 * GIB), Machine("cpu", "a laptop", host_memory=16 * GIB)
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
APART = {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 8}
ONE = {"colocate": True, "offload_rollout": True, "actor_num_gpus_per_node": 8, "rollout_num_gpus_per_engine": 8}
TWO = ONE | {"actor_num_nodes": 2, "rollout_num_gpus_per_engine": 16}
EXPERTS = {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 4}
ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def config_of(**values: Any) -> Config:
    sizes = {"rollout_batch_size": 64, "num_rollout": 3, "rollout_max_response_len": 2048, "lr": 1e-4}
    return Config.from_flat(sizes | {"lora_rank": 8} | values, PassThrough(transformer=RECOMPUTE))


def plan(shape: ModelShape, machine: Machine = H100, **values: Any) -> tuple[Plan, Config]:
    config = config_of(**values)
    return make_plan(config, shape, device=machine.device, num_prompts=9, machine=machine), config


def share(planned: Plan, config: Config) -> float:
    spec = AdapterSpec(rank=config.lora.lora_rank, alpha=32, targets=tuple(config.lora.target_modules))
    return training_bytes(planned, config, spec).optimizer / training_bytes(planned, config, None).optimizer


@pytest.mark.parametrize(
    ("shape", "machine", "values", "verdict"),
    [
        (QUICKSTART, LAPTOP, {"lora_rank": 1}, "fits"),
        (QWEN3_30B, H100, ONE | EXPERTS, "fits"),
        (QWEN3_30B, H100, TWO | EXPERTS, "fits"),
        # In a colocated push trainers and engines have all weights at once: 110 GiB of a device.
        (QWEN3_235B, H100, ONE | EXPERTS, "DOES NOT FIT"),
        (QWEN3_235B, H100, TWO | EXPERTS | {"expert_model_parallel_size": 16}, "fits"),
        (QWEN3_235B, H100, APART | EXPERTS, "fits"),
    ],
    ids=["quickstart", "30B on 8", "30B on 2 nodes", "235B on 8", "235B on 2 nodes", "235B on 2 nodes, apart"],
)
def test_the_optimizer_is_at_most_two_percent_of_full_trainings(
    shape: ModelShape, machine: Machine, values: dict[str, Any], verdict: str
) -> None:
    started = time.process_time()
    planned, config = plan(shape, machine, **values)
    text = render_plan(planned, config)
    assert time.process_time() - started < here_s(20)  # a cache that is missing takes a minute
    assert 0 < share(planned, config) < 0.02
    assert re.search(rf"^verdict    {verdict}", text, re.MULTILINE), text


def test_qwen3_8b_of_rank_32() -> None:
    planned, config = plan(QWEN3_8B, lora_rank=32, actor_num_gpus_per_node=1)
    text = render_plan(planned, config)
    assert "87.29 M parameters are trained, 1.07% of the model's" in text
    assert share(planned, config) <= 0.011
    assert "adapters are pushed, 174.6 MB a version: engines add it to each product" in text
    assert planned.push_bytes / 174.6e6 > 90


def test_counts_are_those_of_all_experts() -> None:
    shape = shape_from_hf_config(RAW_30B | {"num_hidden_layers": 2, "num_experts": 4})
    for targets in (("all-linear",), ("down_proj",), ("linear_qkv",)):
        spec = AdapterSpec(rank=3, alpha=32, targets=targets)
        assert num_adapter_parameters(shape, spec) == sum(rule.numel for rule in adapter_rules(shape, spec).values())


def test_the_policy_without_its_adapters_is_the_reference_and_a_critic_is_whole() -> None:
    with_kl: dict[str, Any] = {"use_kl_loss": True, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 1}
    assert "reference" not in render_plan(*plan(QWEN3_8B, **with_kl))
    assert "reference weights" in render_plan(*plan(QWEN3_8B, **with_kl | {"lora_rank": 0}))
    assert not frozen_of(auxiliary_config(config_of(advantage_estimator="ppo"), "critic"), TINY)


def test_engines_have_room_for_versions() -> None:
    (less, _), (more, config) = plan(TINY, LAPTOP, lora_push="merged"), plan(TINY, LAPTOP)
    assert less.memory is not None and less.memory.engine is not None
    assert more.memory is not None and more.memory.engine is not None
    spec = AdapterSpec(rank=8, alpha=32)
    assert served_bytes(TINY, spec, 1, 4) == 4 * num_adapter_parameters(TINY, spec)
    room = adapter_slots(config, None) * served_bytes(TINY, spec, 1, 4)
    assert more.memory.engine.weights - less.memory.engine.weights == room > 0
    assert more.lora_push == "adapter" and less.lora_push == "merged"
    assert adapter_push(config, TINY) is not None and adapter_push(config_of(lora_rank=0), TINY) is None
    with pytest.raises(
        ValueError,
        match="--lora-push adapter: engines take no adapters on down_proj, gate_proj, up_proj of a qwen3_moe model",
    ):
        adapter_push(config_of(lora_push="adapter"), QWEN3_30B)
    assert adapter_push(config_of(lora_push="adapter", **ATTENTION), QWEN3_30B) is not None
