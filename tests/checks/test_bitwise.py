"""--bitwise: what it refuses before a run starts, and what it sets in the environment."""

from dataclasses import replace
from typing import Any

import pytest

from fusionrl.base.environment import DETERMINISTIC_CPU, MKL_MODE
from fusionrl.checks.bitwise import bitwise_errors
from fusionrl.config.config import Config, PassThrough
from fusionrl.engines.spec import EngineSpec, server_environment
from fusionrl.models.shape import shape_from_hf_config
from fusionrl.plan.plan import Plan, make_plan
from fusionrl.runtime.engine_specs import policy_server_args
from tests.own_process import run_code

QWEN3 = {
    **{"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True},
}
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def made(device: Any = "cpu", passed: Any = None, model: Any = None, **values: Any) -> tuple[Config, Plan]:
    values = {"rollout_batch_size": 8, "num_rollout": 3, "rollout_max_response_len": 8, "bitwise": True} | values
    config = Config.from_flat(values, PassThrough(sglang=passed or {}))
    shape = shape_from_hf_config(QWEN3 | (model or {}))
    return config, make_plan(config, shape, device=device, num_prompts=9)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2}, "give --rollout-num-gpus-per-engine 2"),
        ({"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}, "an engine of 2 devices"),
        ({"actor_num_gpus_per_node": 2, "context_parallel_size": 2}, "--context-parallel-size 2"),
        (
            {
                **{"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2, "rollout_num_gpus": 2},
                **{"rollout_num_gpus_per_engine": 2, "model": {"intermediate_size": 96}},
            },
            "an MLP of 96: engines divide it after they made it a multiple of 64",
        ),
        ({"precision": "bf16", "rollout_dtype": "fp32"}, "--precision bf16 and --rollout-dtype fp32"),
        ({"verify_tolerance": 0.5}, "--verify-tolerance 0.5"),
        ({"pipeline": "async-partial", "in_flight": "in_place"}, "--in-flight in_place"),
        (
            {"pause_generation_mode": "in_place", "rollout_function_path": "a.py:f"},
            "--pause-generation-mode in_place",
        ),
        ({"lora_rank": 4}, "--lora-rank 4"),
        ({"multimodal_keys": {"image": "images"}}, "--multimodal-keys"),
        ({"rollout_external_engine_addrs": ["host:1"]}, "--rollout-external-engine-addrs"),
        ({"passed": {"speculative_algorithm": "NGRAM"}}, "--sglang-speculative-algorithm NGRAM"),
        ({"passed": {"kv_cache_dtype": "fp8_e4m3"}}, "--sglang-kv-cache-dtype fp8_e4m3"),
        ({"passed": {"ep_size": 2}, "model": MIXTURE}, "--sglang-ep-size 2"),
        (
            {
                **{"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
                **{"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2, "model": MIXTURE},
            },
            "--expert-tensor-parallel-size 1 and --tensor-model-parallel-size 2",
        ),
        ({"model": {"model_type": "glm4", "attention_bias": False}}, "a glm4 model"),
        (
            {
                **{"actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 4},
                **{"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4},
            },
            "--tensor-model-parallel-size 4",
        ),
    ],
)
def test_what_is_refused(values: dict[str, Any], named: str) -> None:
    (error,) = bitwise_errors(*made(**values))
    assert error.startswith("--bitwise with ") and named in error and error.endswith("or leave out --bitwise")
    assert not bitwise_errors(*made(**values | {"bitwise": False}))


def test_what_is_exact_on_a_cpu() -> None:
    two = {"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2, "rollout_num_gpus_per_engine": 2}
    for values in (
        *({}, {"precision": "bf16", "rollout_dtype": "bf16"}, two | {"rollout_num_gpus": 2}),
        two | {"rollout_num_gpus": 2, "model": MIXTURE},
        {"pipeline": "async-partial"},
        {"pause_generation_mode": "in_place"},  # on-policy, no request runs at a push
    ):
        config, plan = made(**values)
        assert not bitwise_errors(config, plan)
        assert "enable_deterministic_inference" not in policy_server_args(config, plan, 0)


def test_engines_on_a_cpu_have_products_that_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 without the flag, too. Intel's CPUs show what the environment does for MKL, those with AMX for oneDNN."""
    for name in (MKL_MODE[0], *DETERMINISTIC_CPU):
        monkeypatch.delenv(name, raising=False)
    spec = EngineSpec(0, "model", "cpu", "float32", 1, (0,), "127.0.0.1", None, "", 0)
    plain, bitwise = server_environment(spec), server_environment(replace(spec, bitwise=True))
    assert dict([MKL_MODE]).items() <= plain.items() and DETERMINISTIC_CPU.items() <= bitwise.items()
    assert DETERMINISTIC_CPU.keys().isdisjoint(plain), "bf16 is faster with AMX"
    code = "import torch; from fusionrl.cpu import bitwise, row_products\n"
    assert run_code(code + "print(row_products.least_rows())", **plain).strip() in ("1", "4")
    assert run_code(code + "torch.set_num_threads(1); bitwise.start(); print('started')", **bitwise) == "started\n"


def test_gpus_get_deterministic_kernels() -> None:
    config, plan = made("cuda", rollout_dtype="fp32", precision="fp32")
    assert "--rollout-dtype fp32" in bitwise_errors(config, plan)[0]
    config, plan = made("cuda")
    assert not bitwise_errors(config, plan)
    assert policy_server_args(config, plan, 0)["enable_deterministic_inference"] is True
    spec = EngineSpec(0, "model", "cuda", "bfloat16", 1, (0,), "127.0.0.1", None, "", 0, bitwise=True)
    environment = server_environment(spec)
    assert (environment["NCCL_ALGO"], environment["CUBLAS_WORKSPACE_CONFIG"]) == ("Ring", ":4096:8")
