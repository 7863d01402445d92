"""What Megatron would refuse later is refused on the plan, by the flag; what the plan accepts, Megatron accepts."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionrl.checks.model import megatron_errors
from fusionrl.cli.resolve import resolve
from fusionrl.config.config import PassThrough
from fusionrl.config.parser import CommandLineError
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.layout import TrainerLayout, model_errors
from fusionrl.plan.trainer_plan import trainer_plan
from tests.trainer.trainer_worker import config_of

Rows = Callable[..., Path]


def _errors(folder: Path, layout: TrainerLayout | None = None, **passed: dict[str, Any]) -> list[str]:
    config = config_of(folder, precision="fp32", device="cpu").model_copy(update={"passthrough": PassThrough(**passed)})
    return megatron_errors(config, read_model_shape(str(folder)), trainer_plan(config, layout or TrainerLayout(1)))


@pytest.mark.parametrize(
    ("kind", "fields", "flag", "says"),
    [
        ("transformer", {"recompute_granularity": "full"}, "--recompute-granularity full", "recompute_method"),
        ("transformer", {"recompute_granularity": "some"}, "--recompute-granularity some", "some"),
        ("transformer", {"cpu_offloading": True, "cpu_offloading_num_layers": 9}, "--cpu-offloading-num-layers 9", ""),
        ("ddp", {"reuse_grad_buf_for_mxfp8_param_ag": True}, "--reuse-grad-buf-for-mxfp8-param-ag", "MXFP8"),
        ("optimizer", {"use_precision_aware_optimizer": True, "main_grads_dtype": "x"}, "--main-grads-dtype x", ""),
    ],
)
def test_a_refusal_names_the_flag(hf: Any, kind: str, fields: dict[str, Any], flag: str, says: str) -> None:
    folder, _ = hf("llama", True)
    (error,) = _errors(folder, **{kind: fields})
    assert flag in error and says in error
    assert "\n" not in error and "Traceback" not in error


def test_what_layers_of_the_model_have_is_no_flag_s(hf: Any) -> None:
    """Engines would compute it as config.json says."""
    folder, _ = hf("gemma3_text", True)
    (error,) = _errors(folder, transformer={"window_size": [3, 0]})
    assert error.startswith("--window-size [3, 0]: the config.json of --hf-checkpoint says (7, 0)")
    folder, _ = hf("qwen3_moe", False)
    assert _errors(folder, transformer={"moe_router_load_balancing_type": "aux_loss"}) == []


def test_an_optimizer_of_transformer_engine_s_is_refused_with_the_cure(hf: Any) -> None:
    folder, _ = hf("llama", True)
    passed: dict[str, Any] = {"use_precision_aware_optimizer": True, "adam_eps": 1e-7}
    (error,) = _errors(folder, optimizer=passed)
    assert error.startswith("--use-precision-aware-optimizer: the optimizer of lower precision is Transformer Engine's")
    assert error.endswith("leave it out (the states stay in fp32)")
    (error,) = _errors(folder, optimizer={**passed, "exp_avg_dtype": torch.bfloat16})
    assert error.startswith("--use-precision-aware-optimizer, --exp-avg-dtype") and "leave them out" in error
    good = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert _errors(folder, transformer=good, ddp={"bucket_size": 1000}) == []


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_megatron_accepts_what_the_plan_accepts(hf: Any, family: str) -> None:
    """Without flags of Megatron's its checks are not run: the plan's own must leave it nothing to refuse."""
    folder, _ = hf(family, family == "llama")
    shape = read_model_shape(str(folder))
    num_accepted = 0
    for tp, pp, vpp, cp, ep, etp in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2)):
        for world_size in (1, 2, 4, 8, 16):
            try:
                layout = TrainerLayout(world_size, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp)
            except ValueError:
                continue
            if model_errors(layout, shape, {}):
                continue
            num_accepted += 1
            assert _errors(folder, layout) == [], layout
    assert num_accepted > 20


SCHEDULE = ["--lr-decay-style", "linear", "--lr-warmup-iters"]


def _plan(folder: Path, prompts: Path, *flags: str) -> list[str]:
    common = ["--hf-checkpoint", str(folder), "--prompt-data", str(prompts), "--device", "cpu", "--rm-type", "random"]
    sizes = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "4"]
    try:
        resolve([*common, *sizes, "--num-rollout", "3", *flags])
    except CommandLineError as error:
        return error.errors
    return []


def test_a_warm_up_as_long_as_the_decay_is_refused_on_the_plan(tiny_model: Path, write_rows: Rows) -> None:
    """Steps of the run are those of the plan: rollouts x optimizer steps of each; also of a critic's own warm-up."""
    prompts = write_rows([{"input": "a"}] * 4)
    assert _plan(tiny_model, prompts, *SCHEDULE, "2") == []
    (error,) = _plan(tiny_model, prompts, *SCHEDULE, "3")
    assert error.startswith("--lr-warmup-iters 3 is not below the 3 steps of the decay")
    assert _plan(tiny_model, prompts, *SCHEDULE, "3", "--num-steps-per-rollout", "2") == []
    (error,) = _plan(tiny_model, prompts, *SCHEDULE, "9", "--lr-decay-iters", "9")
    assert "9 steps of the decay" in error
    critic = ("--advantage-estimator", "ppo", "--critic-lr-warmup-iters", "3")
    (error,) = _plan(tiny_model, prompts, *SCHEDULE, "1", *critic)
    assert error.startswith("--critic-lr-warmup-iters 3")


def test_a_plan_without_flags_of_megatron_imports_none_of_it(
    tiny_model: Path, write_rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    assert _plan(tiny_model, write_rows([{"input": "a"}] * 4), *SCHEDULE, "1") == []
