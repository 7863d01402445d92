"""Checks of the addresses of engines that others have started."""

from __future__ import annotations

import pytest

from fusionrl.checks.engines import guest_errors
from fusionrl.config.config import Config
from fusionrl.config.parser import read_args


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
