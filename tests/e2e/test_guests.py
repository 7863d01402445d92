"""Engines that others have started work for a whole run, join it and leave it, and go on when it has ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from fusionrl.base.environment import extended_environment
from fusionrl.engines.process import PortReservation
from fusionrl.observe.run_dir import read_states
from tests.e2e.launch import launch, metrics_of, printed_by, run, samples_of_step
from tests.engines.real_engine import KEY, real_engine
from tests.warm_nursery import EngineBranch

pytestmark = pytest.mark.e2e
MOST_STEPS = 200  # the test ends the run: how long a guest needs to come and to go is a matter of the machine


@dataclass
class Server:
    """One server, beside any run."""

    url: str
    log: Path

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def num_prefills(self) -> int:
        return self.log.read_text(errors="replace").count("Prefill batch")

    def answers(self) -> str:
        """The version of the weights with which it answers now."""
        headers = {"Authorization": f"Bearer {KEY}"}
        payload = {"input_ids": [5, 9], "sampling_params": {"max_new_tokens": 2}}
        found = requests.post(self.url + "/generate", json=payload, headers=headers, timeout=60)
        return str(found.json()["meta_info"]["weight_version"])


@pytest.fixture
def servers(task: Path, tmp_path: Path, engine_branch: EngineBranch) -> Iterator[list[Server]]:
    """One as somebody else starts it, and one as a run starts its own, which is a fork and takes less time."""
    reserved, log = PortReservation("127.0.0.1"), tmp_path / "server.log"
    port = reserved.port
    env = {**os.environ, "FUSIONRL_ENGINE_KEY": KEY, "FUSIONRL_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    env |= {"TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.e2e.guest_server", str(port), str(task / "model")]
    process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=env)
    try:
        engine = real_engine(task / "model", tmp_path)
        try:
            with extended_environment(engine_branch.variables):
                url = engine.start()
            yield [Server(f"http://127.0.0.1:{port}", log), Server(url, tmp_path / "engine-0.log")]
        finally:
            process.send_signal(signal.SIGTERM)
            engine.shutdown()
    finally:
        reserved.release()
        try:
            process.wait(60)
        finally:
            process.kill()


def test_engines_of_others_join_and_leave_a_run(rl_flags: list[str], servers: list[Server], tmp_path: Path) -> None:
    """One is there from the start, another joins in a rollout; then the first one leaves. No sample is lost, and every
    token is of the weights that it claims. Then one works for another run."""
    first, second = servers
    folder = tmp_path / "run"
    flags = [*rl_flags, "--run-dir", str(folder), "--no-save", "--update-weight-transport", "broadcast"]
    flags += ["--rollout-external-engine-addrs", first.address, "--verify-weights", "always"]
    flags += ["--rollout-ignore-eos", "--rollout-max-response-len", "24", "--num-rollout", str(MOST_STEPS)]

    def state_of(server: Server) -> str | None:
        return {state["url"]: state["state"] for state in read_states(folder)}.get(server.url)

    def has_step(number: int) -> bool:
        return any(row["step"] >= number for row in metrics_of(folder))

    with launch(flags, tmp_path, FUSIONRL_ENGINE_KEY=KEY) as launched:
        launched.wait_for(lambda: has_step(0))
        assert state_of(first) == "serving"
        printed_by("engines", "add", second.url, "--run-dir", str(folder))
        launched.wait_for(lambda: state_of(second) in ("ready", "serving"))
        launched.wait_for(lambda: state_of(second) == "serving")
        printed_by("engines", "remove", first.url, "--run-dir", str(folder))
        launched.wait_for(lambda: state_of(first) == "gone")
        last = metrics_of(folder)[-1]["step"]
        launched.wait_for(lambda: has_step(last + 2))
        os.kill(launched.process.pid, signal.SIGTERM)
        assert launched.wait() == 143, launched.output()[-3000:]

    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    if "sync/verify_logprob_diff" not in rows[-1]:
        rows.pop()  # the stop request came before its push
    for row in rows:
        assert row["sync/verify_logprob_diff"] < 1e-4
    for row in rows[1:]:
        assert row["train/logprob_diff_max"] < 1e-4 and row["rollout/failed"] == 0
        samples = samples_of_step(folder, row["step"])
        assert len(samples) == 32 and {sample["response_length"] for sample in samples} == {24}
        assert all(set(sample["weight_versions"]) == {row["step"] - 1} for sample in samples)
    assert first.num_prefills() > 0 and second.num_prefills() > 0
    # Both still serve: with the weights of the last push that each has got.
    assert int(second.answers()) == rows[-1]["step"] > int(first.answers()) > 0
    assert "gone" in printed_by("engines", "list", "--run-dir", str(folder))
    _by_files(rl_flags, first, tmp_path)


def _by_files(rl_flags: list[str], server: Server, tmp_path: Path) -> None:
    """The run's own engine loads deltas; a guest each version in full, from the folder that the trainers wrote."""
    folder, before = tmp_path / "by-files", server.num_prefills()
    flags = [*rl_flags, "--run-dir", str(folder), "--no-save", "--num-rollout", "2", "--verify-weights", "always"]
    flags += ["--update-weight-transport", "disk", "--update-weight-mode", "delta"]
    flags += ["--update-weight-local-checkpoint-dir", str(tmp_path / "local")]
    flags += ["--rollout-external-engine-addrs", server.address]
    run(flags, tmp_path, FUSIONRL_ENGINE_KEY=KEY)
    rows = metrics_of(folder)
    assert [row["sync/full_hosts"] for row in rows] == [0.0, 1.0, 1.0], "the first version is full for all"
    assert rows[0]["perf/update_weights_density"] == 1.0 > rows[1]["perf/update_weights_density"]
    assert all(row["sync/verify_logprob_diff"] < 1e-4 for row in rows)
    assert all(row["train/logprob_diff_max"] < 1e-4 and row["rollout/failed"] == 0 for row in rows[1:])
    assert server.num_prefills() > before
    # It serves on, though the files are gone.
    assert not list((folder / "weights").glob("*"))
    assert int(server.answers()) == rows[-1]["sync/version"] == 2
