"""A whole run under a stranger's eyes: who listens and what is answered without a key, and where secrets are.

Then one under a policy that writes nothing but cheats and escapes.
"""

import json
import os
import re
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from fusionrl.observe.rollouts import read_rollouts
from fusionrl.rewards.registry import REASONS
from tests.e2e.hooks import hostile_programs
from tests.e2e.launch import Launched, launch, metrics_of, run
from tests.e2e.strangers import Listener, answers_as_a_store, command_of, is_loopback, listeners, what_a_stranger_gets

pytestmark = pytest.mark.e2e

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "security.md"
SHELL = {
    "HF_TOKEN": "hf_stolen0123456789",
    "WANDB_API_KEY": "wandbstolen0123456789",
    "AWS_SECRET_ACCESS_KEY": "awsstolen0123456789",
    "OPENAI_API_KEY": "sk-hook0123456789",
}
RAY_PROCESSES = r"^ray::|gcs_server|raylet|/ray/|runtime/ray_programs\.py|tests\.warm_start train"
KINDS = {
    r"gcs_server": "Ray: GCS",
    r"/raylet/raylet": "Ray: raylet",
    r"^ray::(Engine|Buffer|Policy|Critic|ProcessReward)Worker": "Ray: actors",
    r"tests\.warm_start train": "Ray: driver",
    r"engines\.launch_server": "engine",
    r"^sglang::router": "router",
    r"^sglang::scheduler": "engine's ranks, gloo",
}


def _kind(listener: Listener, answer: str) -> str:
    kind = next((kind for pattern, kind in KINDS.items() if re.search(pattern, listener.command)), listener.command)
    if kind == "Ray: actors" and not answer.startswith("gRPC"):
        return "session proxy" if answer.startswith("HTTP") else "trainers, gloo"
    return "router, Prometheus" if kind == "router" and "/metrics" in answer else kind


def _answer(listener: Listener) -> str | None:
    """What a stranger gets; None: nobody listens there any more."""
    try:
        return what_a_stranger_gets(listener)
    except (ConnectionRefusedError, ConnectionResetError):  # the latter at the moment when it goes
        return None


def _answers(asked: Sequence[Listener]) -> dict[Listener, str | None]:
    """All are asked at once: gloo's are silent, and each question to one takes the whole timeout."""
    with ThreadPoolExecutor(len(asked) or 1) as pool:
        return dict(zip(asked, pool.map(_answer, asked), strict=True))


def _processes(launched: Launched) -> set[int]:
    """All of the run: descendants of the driver, and what carries its mark."""
    driver = psutil.Process(launched.process.pid)
    return {driver.pid, *launched.living(), *(child.pid for child in driver.children(recursive=True))}


def _holders(pids: set[int], secret: str) -> dict[str, list[str]]:
    """Places with the secret: "environ" and "cmdline" → command lines."""
    found: dict[str, list[str]] = {"environ": [], "cmdline": []}
    for pid in pids:
        for place, holders in found.items():
            try:
                if secret.encode() in Path(f"/proc/{pid}/{place}").read_bytes():
                    holders.append(command_of(pid)[:120])
            except OSError:
                continue  # it ended meanwhile
    return found


def _paths(folder: Path) -> list[Path]:
    """List what is in a run's folder, without a save that was cut: the guard removes it after the run."""
    places = [(place, *folders, *files) for place, folders, files in os.walk(folder) if ".writing" not in place]
    return [Path(place, name) for place, *names in places for name in names if not name.startswith(".writing")]


def _files_with(folder: Path, secrets: dict[str, str]) -> list[str]:
    texts = {path: path.read_bytes() for path in _paths(folder) if path.is_file() and not path.is_symlink()}
    return [
        f"{path.relative_to(folder)}: {name}"
        for path, text in texts.items()
        for name, value in secrets.items()
        if value.encode() in text
    ]


def _documented() -> set[tuple[str, str]]:
    """(process, what a stranger gets) of the table in docs/guides/security.md."""
    rows = re.findall(r"^\| ([^|]+?) \| loopback \| ([^|]+?) \|", DOCS.read_text(), re.MULTILINE)
    return {(process, answer) for process, answer in rows}


def test_a_store_is_recognised() -> None:
    """The probe below would find a TCPStore: else it would show nothing."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert answers_as_a_store(Listener("127.0.0.1", store.port, os.getpid(), "this test"))


@pytest.mark.cold
def test_a_run_shows_strangers_nothing(rl_flags: list[str], tmp_path: Path) -> None:
    """Two trainers, two engines, agents behind the session proxy. Every listener is on loopback and answers nobody
    without a key; the run outlives the questions. Secrets of the shell stay in the shell, and the run's own are in no
    file and no command line."""
    folder, told = tmp_path / "run", tmp_path / "told.json"
    flags = [*rl_flags, "--custom-rm-path", "tests/e2e/hooks.py:tells_its_secrets", "--hook-env", "OPENAI_API_KEY"]
    flags += ["--custom-generate-function-path", "fusionrl.rollout.sessions.generate"]
    flags += ["--agent-path", "tests/e2e/session_agents.py:asks_once"]
    flags += ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--num-rollout", "100000"]
    flags += ["--save-interval", "2", "--keep-checkpoints", "1", "--run-dir", str(folder)]
    with launch(flags, tmp_path, FUSIONRL_TEST_FILE=str(told), **SHELL) as launched:
        launched.wait_for(lambda: told.exists() and len(metrics_of(folder)) > 2, timeout_s=300)
        pids = _processes(launched)

        asked = listeners(pids)
        answers = _answers(asked)
        gone = {listener for listener, answer in answers.items() if answer is None}
        assert not gone & set(listeners(pids)), (
            f"listen and refuse: {gone}"
        )  # else workers of Ray's that ended meanwhile
        # Whoever asks the sleeper in the place of Ray's agent wakes the agent, which answers nobody without a key.
        (sleeper,) = [one for one in gone if "ray_programs.py agent" in one.command]
        assert is_loopback(sleeper.address)
        launched.wait_for(lambda: bool(_on_port(pids, sleeper.port)))
        assert [what_a_stranger_gets(agent) for agent in _on_port(pids, sleeper.port)] == ["HTTP: 401"]
        for _ in range(5):
            found: dict[tuple[str, str], list[Listener]] = {}
            for listener, answer in answers.items():
                if answer is not None:
                    found.setdefault((_kind(listener, answer), answer), []).append(listener)
            if _documented() <= set(found):
                break
            # On a busy machine one that answers late is taken for a silent one.
            answers |= _answers([listener for listener, answer in answers.items() if answer == "no answer"])
        exposed = [one for group in found.values() for one in group if not is_loopback(one.address)]
        assert not exposed, exposed
        assert set(found) == _documented(), "\n".join(f"{one}: {len(found[one])}" for one in sorted(found))

        # What a hook was given, and what it was not.
        given = json.loads(told.read_text())
        key = given["FUSIONRL_ROUTER_KEY"]
        assert len(key) == 48 and given["OPENAI_API_KEY"] == SHELL["OPENAI_API_KEY"]
        assert given["HF_TOKEN"] is given["WANDB_API_KEY"] is given["RAY_AUTH_TOKEN"] is None

        children = pids - {launched.process.pid}
        for name, value in {**SHELL, "the engines' key": key}.items():
            assert _holders(children, value) == {"environ": [], "cmdline": []}, name
        (token,) = {
            entry.partition(b"=")[2].decode()
            for pid in children
            for entry in _environment(pid)
            if entry.startswith(b"RAY_AUTH_TOKEN=")
        }
        holders = _holders(children, token)
        assert holders["cmdline"] == []
        assert all(re.search(RAY_PROCESSES, command) for command in holders["environ"]), holders

        secrets = {**SHELL, "key": key, "token": token}
        private = [Path(command) for command in re.findall(r"--temp-dir=(\S+)/ray ", _raylet(pids))]
        assert private and all(path.stat().st_mode & 0o777 == 0o700 for path in private)
        for place in (folder, private[0]):
            assert _files_with(place, secrets) == []
        num_lines = len(metrics_of(folder))
        launched.wait_for(lambda: len(metrics_of(folder)) > num_lines + 1)
        os.kill(launched.process.pid, signal.SIGTERM)
        assert launched.wait() == 143
    text = " ".join(launched.output().split())
    saved = re.search(r"terminated by SIGTERM after step (\d+); step_0*(\d+) has all of it", text)
    assert saved is not None and saved[1] == saved[2], text
    assert (folder / "checkpoints" / f"step_{int(saved[1]):06d}" / "manifest.json").is_file()
    assert not private[0].exists()
    assert _files_with(folder, secrets) == []
    assert "***" in (folder / "logs" / "engine-0.log").read_text(), "SGLang prints its arguments"
    rights = {path: path.stat().st_mode & 0o777 for path in [folder, *_paths(folder)] if path.exists()}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in rights.items()), rights
    assert "HF_TOKEN" in (folder / "logs" / "driver.log").read_text(), "the run says what it does not pass on"


def test_a_client_with_and_one_without_a_key(rl_flags: list[str], tmp_path: Path) -> None:
    """Rollout functions written for slime: one sends `args.api_key`, and trains. The router refuses one that does not,
    and the log explains that."""
    folder = tmp_path / "run"
    flags = [*rl_flags, "--rollout-function-path", "tests/e2e/hooks.py:soon_keyless_rollout", "--num-rollout", "2"]
    flags += ["--run-dir", str(folder), "--no-save", "--use-kl-loss", "--kl-loss-coef", "0.1"]
    output = run(flags, tmp_path, code=1).output()
    # It is synchronous, returns plain lists, and leaves rewards to the caller.
    row = metrics_of(folder)[-1]
    assert row["step"] == 1 and row["train/logprob_diff_mean"] < 1e-4
    assert row["train/grad_norm"] > 0
    assert np.isfinite(row["train/kl_loss"])
    samples = list(read_rollouts(folder, "train"))
    assert len({sample["reward"] for sample in samples}) > 1
    # It asks the engines by a client of its own.
    assert all(sample["weight_versions"] is None for sample in samples)
    assert output.count("the weight versions of its tokens are not known") == 1
    # The second rollout.
    assert "answered 401 to 1 requests" in output and "Authorization: Bearer KEY" in output
    assert "args.api_key" in output and "FUSIONRL_ROUTER_KEY" in output and "keyless_rollout" in output


def _on_port(pids: set[int], port: int) -> list[Listener]:
    return [one for one in listeners(pids) if one.port == port and "RuntimeEnvAgent" in one.command]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _raylet(pids: set[int]) -> str:
    return next(command for command in map(command_of, pids) if "/raylet/raylet" in command)


def test_cheats_and_escapes_earn_nothing_and_the_run_goes_on(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """The run comes to its end, each program scores 0, each has a reason."""
    folder = tmp_path / "run"
    num_programs = len(hostile_programs())
    num_rollout, group = 2, 4
    num_prompts = -(-num_programs // (num_rollout * group))
    at = rl_flags.index("--custom-rm-path")
    flags = [*rl_flags[:at], "--rm-type", "code_all", *rl_flags[at + 2 :]]
    flags += ["--custom-generate-function-path", "tests/e2e/hooks.py:hostile_generate", "--allow-weak-sandbox"]
    flags += ["--rollout-batch-size", str(num_prompts), "--num-rollout", str(num_rollout), "--no-save"]
    run([*flags, "--run-dir", str(folder)], tmp_path, timeout_s=480.0)
    assert "sandbox    " in (folder / "plan.txt").read_text()
    rows = [row for row in metrics_of(folder) if "rollout/raw_reward" in row]
    assert [row["rollout/raw_reward"] for row in rows] == [0.0] * num_rollout
    counted = sum(row.get(f"rollout/code_failed/{reason}", 0) for row in rows for reason in REASONS)
    assert counted == num_rollout * num_prompts * group >= num_programs
    assert not any("rollout/reward_timeout" in row or "rollout/reward_crash" in row for row in rows)
    saved = list(read_rollouts(folder, "train"))
    assert {row["response"] for row in saved} == {f"```python\n{source}\n```" for source, _ in hostile_programs()}
    assert all(len(row["metadata"]["code_failures"]) == 1 for row in saved)
