"""Environments of actors: trainers and engines that meet in a group of NCCL's have its settings in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionrl.base.environment import FOLDER_VARIABLE, PEERS_VARIABLE
from fusionrl.plan.nccl import CUMEM, NVLS
from fusionrl.runtime.launcher import actor_environment
from tests.plan.test_plan import plan


@pytest.mark.parametrize(
    ("values", "has_settings"),
    [
        ({"rollout_num_gpus": 1}, True),
        ({"rollout_num_gpus": 1, "update_weight_transport": "disk"}, False),
        ({"colocate": True}, False),  # the two sides are in no group, and NCCL's buffers can be given away
        ({"debug_train_only": True}, False),
    ],
)
def test_settings_of_nccl(values, has_settings):
    made = plan("cuda", **values)
    env = actor_environment(made, {}, {CUMEM: "1"}, stores=None, peers=["10.0.0.1", "10.0.0.2"])
    assert {name: env[name] for name in (CUMEM, NVLS) if name in env} == (
        {CUMEM: "1", NVLS: "0"} if has_settings else {}
    )
    assert not any(name.endswith("_SOCKET_IFNAME") for name in env), "each node has its own interfaces"
    assert env[PEERS_VARIABLE] == "10.0.0.1,10.0.0.2" and env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_on_a_cpu(tmp_path: Path):
    env = actor_environment(plan(rollout_num_gpus=1), {}, {}, stores=tmp_path, peers=[])
    assert env["CUDA_VISIBLE_DEVICES"] == "" and env[FOLDER_VARIABLE] == str(tmp_path)
    assert CUMEM not in env and PEERS_VARIABLE not in env
