"""The loop on two Ray nodes, so that nothing assumes one: engine and trainer stand on different nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.launch import metrics_of, run

pytestmark = pytest.mark.e2e


@pytest.fixture
def ray_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whether the cluster asks for a token, "token" or "disabled"; this process, too, and the run."""
    from ray._raylet import AuthenticationTokenLoader, Config

    def settle() -> None:
        Config.initialize("")  # read once, when ray was imported
        AuthenticationTokenLoader.instance().reset_cache()

    with monkeypatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", request.param)
        patch.setenv("RAY_AUTH_TOKEN", "ab" * 32)
        settle()
        yield request.param
    settle()


@pytest.mark.parametrize(
    ("transport", "ray_mode"), [("broadcast", "token"), ("ipc", "disabled")], indirect=["ray_mode"]
)
def test_two_nodes(transport: str, ray_mode: str, rl_flags: list[str], tmp_path: Path) -> None:
    """Attached by --ray-address; by IPC the weights go to the other node by value. A cluster that asks for no token is
    joined when that is allowed, and not before."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"fusionrl_device": 1}, include_dashboard=False)
        if ray_mode == "disabled":
            flags = [*rl_flags, "--ray-address", cluster.address, "--num-rollout", "1"]
            refused = run([*flags, "--run-dir", str(tmp_path / "refused")], tmp_path, code=2)
            assert "asks nobody for a token" in refused.output() and "--allow-open-ray" in refused.output()
        run(
            [
                *rl_flags,
                *(["--allow-open-ray"] if ray_mode == "disabled" else []),
                "--ray-address",
                cluster.address,
                "--num-rollout",
                "1",
                "--no-save",
                "--device",
                "cpu",
            ]
            + ["--run-dir", str(tmp_path / "run"), "--verify-weights", "always"]
            + ["--update-weight-transport", transport],
            tmp_path,
        )
    finally:
        cluster.shutdown()
    rows = metrics_of(tmp_path / "run")
    assert rows[-1]["sync/verify_logprob_diff"] < 1e-4
    assert rows[-1]["train/logprob_diff_mean"] < 1e-4
