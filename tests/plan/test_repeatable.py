"""Whether a run repeats bit by bit: what it says, and why not."""

from typing import Any, Literal

import pytest

from fusionrl.config.config import Config, PassThrough
from fusionrl.models.shape import shape_from_hf_config
from fusionrl.plan.plan import make_plan
from fusionrl.plan.repeatable import Repeatability, repeatability
from tests.models.test_families import shape_of
from tests.plan.shapes import SMALL


def _judged(
    device: Literal["cpu", "cuda"] = "cpu",
    steps: list[dict[str, float]] | None = None,
    family: str | None = None,
    sglang: dict[str, Any] | None = None,
    has_external: bool = False,
    outlasts_record: bool = False,
    **values: Any,
) -> Repeatability:
    config = Config.from_flat(
        {"rollout_batch_size": 8, "num_rollout": 3, "rm_type": "math", **values}, PassThrough(sglang=sglang or {})
    )
    shape = shape_from_hf_config(SMALL) if family is None else shape_of(family)
    plan = make_plan(config, shape, device=device, num_prompts=100, num_cores=8)
    return repeatability(config, plan, steps or [], has_external=has_external, outlasts_record=outlasts_record)


def test_a_plain_run_on_a_cpu_repeats() -> None:
    quiet = [{"rollout/raw_reward": 0.5, "rollout/requests_retried": 0.0}]
    for finding in (
        _judged(steps=quiet),
        _judged(mode="sft"),
        _judged(custom_rollout_log_function_path="m.log"),
        _judged(bitwise=True, precision="bf16", rollout_dtype="bf16"),
        _judged(lora_rank=8, lora_push="merged"),
    ):
        assert finding.to_dict() == {"repeatable": True, "reasons": [], "functions": []}
        assert finding.describe().startswith("repeatable: ")


def test_bitwise_on_gpus_is_not_tried() -> None:
    assert _judged(device="cuda", bitwise=True).reasons == ("--device cuda: no GPU was tried with --bitwise",)


def test_a_run_with_functions_repeats_if_they_do() -> None:
    finding = _judged(custom_rm_path="my.reward", rollout_sample_hook_path=["my.hook"])
    assert finding.to_dict()["repeatable"] is None
    assert finding.describe().endswith("functions are: --rollout-sample-hook-path my.hook, --custom-rm-path my.reward")
    assert _judged(rm_type="remote_rm", rm_url="http://localhost").functions == ("--rm-type remote_rm",)


def test_a_run_that_follows_a_record_repeats() -> None:
    for pipeline in ("async", "async-partial"):
        assert "(--replay-schedule repeats such a run)" in _judged(pipeline=pipeline).describe()
        assert _judged(pipeline=pipeline, replay_schedule="run").to_dict()["repeatable"] is True
    dropped = _judged(pipeline="async", replay_schedule="run", steps=[{"rollout/dropped_deadline": 1.0}])
    assert "how many of their tokens count depends on the time" in dropped.describe()
    outlasting = _judged(pipeline="async", replay_schedule="run", outlasts_record=True)
    assert "ended before the run, which then continued freely" in outlasting.describe()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"device": "cuda"}, "--device cuda"),
        ({"device": "cuda"}, "--sglang-enable-deterministic-inference"),
        ({"pipeline": "async-partial"}, "--pipeline async-partial"),
        ({"rollout_dtype": "bf16"}, "--rollout-dtype bf16"),
        ({"sglang": {"speculative_algorithm": "NGRAM"}}, "read no seeds"),
        ({"engine_group": ["g:num_gpus=1,speculative-algorithm=NGRAM"], "rollout_num_gpus": 1}, "read no seeds"),
        ({"rollout_external_engine_addrs": ["10.0.0.1:30000"]}, "engines of others"),
        ({"has_external": True}, "engines of others joined (engines.txt)"),
        ({"lora_rank": 8}, "--lora-push merged"),
        *(({"steps": [{}, {f"rollout/{name}": 1.0}]}, text) for name, text in [("engines_died", "an engine died")]),
        ({"steps": [{"eval/requests_retried": 2.0}]}, "sent again"),
        ({"steps": [{"rollout/unused_groups": 3.0}]}, "finished first"),
        ({"steps": [{"rollout/timed_out": 1.0}]}, "--sample-timeout"),
    ],
)
def test_what_keeps_a_run_from_repeating_is_said(values: dict[str, Any], reason: str) -> None:
    finding = _judged(**values)
    assert finding.to_dict()["repeatable"] is False
    assert finding.describe().startswith("not repeatable: ") and reason in finding.describe()
