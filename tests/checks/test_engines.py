"""Engines that only evaluate (--eval-num-gpus), and engines that others have started."""

from __future__ import annotations

from typing import Any

import pytest

from fusionrl.checks.engines import eval_engine_errors, guest_errors
from fusionrl.config.config import Config
from fusionrl.config.parser import read_args

FITS: dict[str, Any] = {"eval_num_gpus": 1, "eval_prompt_data": ["a", "a.jsonl"], "eval_interval": 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "eval"}, "in --mode eval all engines evaluate; give --rollout-num-gpus"),
        ({"mode": "sft"}, "no engine evaluates in --mode sft"),
        ({"mode": "reject-sampling"}, "no engine evaluates in --mode reject-sampling"),
        ({"debug_rollout_only": True}, "with --debug-rollout-only nothing is evaluated"),
        ({"debug_train_only": True}, "with --debug-train-only nothing is evaluated"),
        ({"colocate": True}, "with --colocate engines and trainers share their devices and work in turn"),
        ({"eval_prompt_data": []}, "nothing is evaluated; give --eval-prompt-data (or --eval-config)"),
        ({"eval_interval": None, "skip_eval_before_train": True}, "nothing is evaluated; give"),
        ({"update_weight_transport": "ipc"}, "--update-weight-transport ipc reaches engines on the trainers' devices"),
        ({"keep_checkpoints": 1, "keep_best": "eval/a/accuracy"}, "too late for --keep-best eval/a/accuracy"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    errors = eval_engine_errors(Config.from_flat(FITS | changes))
    assert len(errors) == 1 and errors[0].startswith("--eval-num-gpus 1: ") and said in errors[0]


@pytest.mark.parametrize("pipeline", ["on-policy", "stream", "one-step-off", "async", "async-partial"])
@pytest.mark.parametrize("transport", ["auto", "broadcast", "disk"])
def test_every_pipeline_takes_it(pipeline: str, transport: str) -> None:
    assert (
        eval_engine_errors(Config.from_flat(FITS | {"pipeline": pipeline, "update_weight_transport": transport})) == []
    )


def test_none_are_asked_for() -> None:
    assert eval_engine_errors(Config.from_flat({"mode": "sft", "colocate": True})) == []


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
    assert error.startswith("--rollout-num-gpus 0: ") and "--rollout-external-engine-addrs" in error
    assert "give 1 or more" in error and "--mode sft" in error
    assert config.cluster.rollout_num_gpus is None
    assert read_args(["--rollout-num-gpus", "2"])[0].cluster.rollout_num_gpus == 2
