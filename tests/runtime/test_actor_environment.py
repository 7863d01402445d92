"""What a launcher gives to actors, and refuses: environments (of NCCL's settings in common), keys, open files."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.base.environment import FOLDER_VARIABLE, PEERS_VARIABLE
from fusionrl.config.config import Config
from fusionrl.plan.nccl import CUMEM, NVLS
from fusionrl.runtime import early_start, launcher
from fusionrl.runtime.actor_process import ProcessSettings
from fusionrl.runtime.launcher import Launcher, actor_environment
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


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_router_without_a_key_is_for_one_machine_alone(
    is_alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: Any = SimpleNamespace(folder=tmp_path, begin=lambda *_: None, environment=dict)
    monkeypatch.setattr(launcher, "start_ray", lambda *_, **__: True)
    monkeypatch.setattr(launcher, "is_alone", lambda: is_alone)
    monkeypatch.setattr(launcher, "place_devices", lambda *_: (None, []))
    config = Config.from_flat({"router_api_key": "none", "ray_address": "10.0.0.1:6379"})
    starting = Launcher(config, plan(rollout_num_gpus=1), tmp_path, 1, begun)
    if is_alone:
        starting.start()
        return
    with pytest.raises(ValueError, match="--router-api-key none: on several nodes"):
        starting.start()


@pytest.fixture
def few_files() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield min(before[1], 1 << 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_driver_and_an_actor_raise_their_limits(
    few_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> Path:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files
        raise KeyboardInterrupt

    monkeypatch.setattr(early_start, "make_private_folder", begin)
    with pytest.raises(KeyboardInterrupt):
        Launcher(Config(), plan(rollout_num_gpus=1), tmp_path, 1).start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ProcessSettings(0o022).apply()  # of a cluster that the run has joined
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files
