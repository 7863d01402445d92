"""A run on two Ray nodes with engines of different sizes and flags; one spans both nodes, and is lost in between."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fusionrl.base.nursery_client import FOLDER_VARIABLE
from tests.e2e import holds
from tests.e2e.launch import launch, metrics_of
from tests.warm_nursery import EngineBranch, SharedNursery

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, warm_nursery: SharedNursery) -> Iterator[None]:
    """The cluster asks for a token; this process, too, and the run.

    The nodes' servers are forks, as those of a cluster of the run's own are.
    """
    from ray._raylet import AuthenticationTokenLoader, Config

    def settle() -> None:
        Config.initialize("")  # read once, when ray was imported
        AuthenticationTokenLoader.instance().reset_cache()

    with monkeypatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "ab" * 32)
        patch.setenv("RAY_worker_niceness", "0")
        branch = EngineBranch(warm_nursery, "ab" * 32)
        patch.setenv(FOLDER_VARIABLE, branch.variables[FOLDER_VARIABLE])
        try:
            settle()
            yield
        finally:
            branch.close()
    settle()


def _examine(flags: list[str]) -> None:
    """`fusionrl doctor` looks at both nodes, and finds that there are too few."""
    command = [sys.executable, "-m", "fusionrl.cli", "doctor", "--json", *flags, "--rollout-num-gpus", "5"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    found = {finding["check"]: finding for finding in json.loads(ran.stdout)}
    assert found["nodes"]["status"] == "fault" and found["nodes"]["fact"].startswith("2 nodes, 4 devices: "), ran.stderr
    assert found["nodes"]["fact"].endswith("the plan needs 6") and ran.returncode == 2
    assert found["shared"]["fact"] == "all 2 nodes see --run-dir and --hf-checkpoint"
    assert found["reach"]["fact"] == "all 2 nodes reach each other by TCP"
    assert {found[check]["status"] for check in ("versions", "shared", "reach", "clock", "collective")} == {"fact"}


def _servers(model: Path, *flags: str) -> list[psutil.Process]:
    """SGLang's servers of this model that were started with these flags; actors of a joined cluster bear no mark."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        text = " ".join(process.info["cmdline"] or []) + " "  # a fork shows its arguments as one
        if " -m fusionrl.engines.launch_server " in text and f" {model} " in text:
            found += [process] if all(f"{flag} " in text for flag in flags) else []
    return found


def test_two_groups_of_which_one_engine_spans_two_nodes(
    token: None, rl_flags: list[str], task: Path, tmp_path: Path
) -> None:
    """Devices 0 and 1 are on one node, 2 and 3 on the other: a trainer, an engine on 1 and 2, and one on 3.

    The process on the second node is killed in a rollout: the engine ends as a whole, no sample is lost, and it is back
    with the weights. Before, `fusionrl doctor` looks at both nodes.
    """
    from ray.cluster_utils import Cluster

    folder, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(task / "model", model)  # its path tells this run's servers from those of tests beside it
    wide = ["--tp-size 2", "--nnodes 2", "--max-total-tokens 16384"]
    small = ["--tp-size 1", "--max-total-tokens 32768", "--max-running-requests 16"]
    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"fusionrl_device": 2}, include_dashboard=False)
        flags = [*rl_flags, "--ray-address", cluster.address, "--num-rollout", "2", "--run-dir", str(folder)]
        _examine(flags)
        with launch(
            [*flags, "--no-save", "--hf-checkpoint", str(model)]
            + ["--engine-group", "wide:num_gpus=2,per_engine=2,max-total-tokens=16384"]
            + ["--engine-group", "small:num_gpus=1,max-running-requests=16"]
            + ["--use-fault-tolerance", "--verify-weights", "always", "--update-weight-transport", "broadcast"]
            + ["--rollout-ignore-eos", "--rollout-max-response-len", "60"]
            + holds.flags(folder, rollouts=[0, 1]),
            tmp_path,
        ) as launched:
            holds.wait_for_held(launched, folder, 0)
            assert len(_servers(model)) == 3
            (head,), (part,) = (_servers(model, *wide, f"--node-rank {rank}") for rank in (0, 1))
            assert len(_servers(model, *small)) == 1
            holds.let_go(folder, 0)
            holds.wait_for_held(launched, folder, 1)
            part.send_signal(signal.SIGKILL)
            holds.let_go(folder, 1)
            assert launched.wait() == 0, launched.output()[-3000:]
        psutil.wait_procs([head], timeout=60)
        deadline = time.monotonic() + 60  # actors of a joined cluster may outlive the driver for a moment
        while _servers(model) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not head.is_running() and _servers(model) == []
    finally:
        cluster.shutdown()

    assert not [*tmp_path.glob("**/.fusionrl-doctor-*")]
    assert "by broadcast" in (folder / "plan.txt").read_text()
    rows = metrics_of(folder)
    assert [row["sync/version"] for row in rows] == [0, 1, 2]
    assert all(row["sync/verify_logprob_diff"] < 1e-4 for row in rows)  # of both engines
    assert rows[1]["train/logprob_diff_mean"] < 1e-4 and rows[2]["train/logprob_diff_mean"] < 1e-4
    assert [row["rollout/engines_died"] for row in rows[1:]] == [0, 1]
    assert [row["sync/engines_restarted"] for row in rows] == [0, 0, 1]
    assert "engine 0 part 1" in (folder / "logs" / "driver.log").read_text()
