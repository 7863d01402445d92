"""While trainers work or engines generate: a stop request is heard, and an engine that dies is noticed. Ray is real."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import remove_placement_group

from fusionrl.observe import spans
from fusionrl.observe.stalls import EngineLoad
from fusionrl.runtime.early_start import CLUSTER_TOKEN
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.ray_cluster import place_devices
from fusionrl.runtime.supervisor import ActorDied, ActorRegistry, StopSignal, Supervisor, Terminated, origin_of
from fusionrl.runtime.watchdog import ProgressProbes, Watchdog, look_on
from fusionrl.runtime.worker_imports import WHEN_IT_ANSWERS
from fusionrl.weights.remote_calls import get
from tests.clock import here_s
from tests.own_process import wait_until

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("shared_cluster")]


class Worker:
    """A trainer or a Buffer: works for a while, or fails at once."""

    def __init__(self, log: str = os.devnull) -> None:
        with open(log, "a") as file:
            file.write("key is s3cret\n")

    def work(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    def work_until(self, told: str, then_dies: str | None = None) -> str:
        """Work until the driver has said something; then, with an engine that dies, for a second more."""
        until = time.monotonic() + 60.0
        while not os.path.exists(told):
            if time.monotonic() > until:
                return "not told while it worked"
            time.sleep(0.05)
        if then_dies is not None:
            Path(then_dies).touch()
            time.sleep(1.0)
        return "done"

    def pid(self) -> int:
        return os.getpid()

    def facts(self) -> tuple[str, str | None, int]:
        return ray.get_runtime_context().get_node_id(), os.environ.get("RAY_AUTH_TOKEN"), os.getppid()

    def fail(self) -> None:
        raise OSError("Connection closed by peer")

    def ask(self, other: Any) -> Any:
        return ray.get(other[0].work.remote(0.0))

    def progress(self) -> None:
        time.sleep(60.0)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Engine:
    """Dead as soon as its file is there."""

    def watch(self, path: str) -> None:
        self.path = Path(path)

    def check_alive(self) -> None:
        if self.path.exists():
            raise RuntimeError("generation of engine 1 at http://e: the process ended (killed by SIGKILL)")


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with StopSignal() as signal_:
        yield signal_


def actor_of(cls: type, *args: Any) -> Any:
    """An actor that has started."""
    actor = ray.remote(cls).options(num_cpus=0, max_concurrency=16).remote(*args)
    ray.get(actor.__ray_ready__.remote())
    return actor


@pytest.fixture(scope="module")
def engines(shared_cluster: Any) -> list[Any]:
    """Two, which all tests share: their processes take seconds to start."""
    return [actor_of(Engine) for _ in range(2)]


@pytest.fixture(scope="module")
def worker(shared_cluster: Any) -> Any:
    """One that several tests share; some leave work behind."""
    return actor_of(Worker)


@pytest.fixture
def supervisor(engines: list[Any], tmp_path: Path, stop: StopSignal) -> Supervisor:
    """Of the two engines, without --use-fault-tolerance; each is well until its number is a file in `tmp_path`."""
    nothing: Any = SimpleNamespace(num_engines=2, takes_turns=False)
    pool = EnginePool(nothing, nothing, nothing)
    pool.engines = engines
    ray.get([engine.watch.remote(str(tmp_path / str(index))) for index, engine in enumerate(engines)])
    ray.get([engine.check_alive.remote() for engine in engines])
    return Supervisor(pool.check, stop, interval_s=0.1)


def later(action: Any, *args: Any) -> None:
    threading.Timer(0.5, action, args).start()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> str:
    """A file that is there once the supervisor has logged a warning."""
    path = tmp_path / "told"

    def touch(record: logging.LogRecord) -> bool:
        if record.name.endswith("runtime.supervisor") and record.levelno >= logging.WARNING:
            path.touch()
        return True

    caplog.handler.addFilter(touch)
    return str(path)


def test_an_engine_that_dies_while_trainers_work_is_told_then(supervisor, worker, tmp_path, caplog, told) -> None:
    """The training goes to its end, so that the step can be saved."""
    later((tmp_path / "1").touch)
    assert supervisor.finish([worker.work_until.remote(told), worker.work.remote(0.0)]) == ["done", "done"]
    text = "the run ends after this training step: generation of engine 1 at http://e: the process ended"
    assert caplog.text.count(text) == 1
    with pytest.raises(RuntimeError, match="engine 1 at http://e: the process ended"):
        supervisor.wait(worker.work.remote(30.0))


def test_a_stop_request_is_heard_while_trainers_work(supervisor, worker, tmp_path, stop, caplog, told) -> None:
    """It is told at once. The training goes to its end, and no engine is needed any more."""
    later(os.kill, os.getpid(), signal.SIGTERM)
    assert supervisor.finish([worker.work_until.remote(told, str(tmp_path / "0"))]) == ["done"]
    assert caplog.text.count("SIGTERM: this rollout is trained to its end") == 1
    with pytest.raises(Terminated):
        stop.check()


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """A shell's background job ignores SIGINT, and so would a test in it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_ends_a_training_at_once(supervisor: Supervisor, worker: Any, stop: StopSignal) -> None:
    """Also as the second SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        start = time.monotonic()
        if number == signal.SIGTERM:
            os.kill(os.getpid(), number)  # the first one; the system makes one of two that nobody has taken yet
            wait_until(stop.is_requested)
        later(os.kill, os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            supervisor.finish([worker.work.remote(20.0)])
        assert time.monotonic() - start < here_s(10)


def test_a_stop_request_ends_a_rollout_and_hides_neither_an_error_nor_a_death(supervisor, worker, tmp_path) -> None:
    def failed() -> Any:
        ref = worker.fail.remote()
        assert ray.wait([ref], timeout=60)[0]
        return ref

    later(os.kill, os.getpid(), signal.SIGTERM)
    with pytest.raises(Terminated):
        supervisor.wait(worker.work.remote(30.0))
    with pytest.raises(OSError, match="Connection closed"):
        supervisor.wait(failed())
    (tmp_path / "1").touch()
    with pytest.raises(RuntimeError, match="engine 1"):
        supervisor.wait(failed())


def test_devices_that_are_missing_or_taken_are_counted() -> None:
    """The cluster has one: a run that needs two is refused at once, and one that finds it taken after its time."""
    with pytest.raises(ValueError, match="the plan needs 2 devices .* the Ray cluster has 1"):
        place_devices("cpu", 2, 60.0)
    group, bundles = place_devices("cpu", 1, 60.0)
    try:
        assert len(bundles) == 1
        with pytest.raises(ValueError, match=r"were not free within 1 s \(--placement-timeout-s\); 0 of 1 are free"):
            place_devices("cpu", 1, 1.0)
        with pytest.raises(RuntimeError, match="were not free within 1 s"):  # a run that is resumed had them
            place_devices("cpu", 1, 1.0, may_come_back=True)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="the plan needs 2 devices"):
            place_devices("cpu", 2, 1.0, may_come_back=True)
        assert time.monotonic() - start >= 1.0
    finally:
        remove_placement_group(group)


def test_a_dead_actor_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    """Behind its own error, behind one of an actor that asked it, and behind a closed connection."""
    registry = ActorRegistry()
    registry.begin(["s3cret", None])
    names = ["trainer rank 0", "trainer rank 3", "the Buffer", "engine 1"]
    actors = {name: actor_of(Worker, str(tmp_path / f"{name}.log")) for name in names}
    for name, actor in actors.items():
        registry.add(name, actor, tmp_path / f"{name}.log")
        ray.get(actor.work.remote(0.0))
    with (tmp_path / "trainer rank 3.log").open("a") as log:
        log.write("".join(f"line {number}\n" for number in range(20)))
    assert registry.explain(OSError("a user's"), patience_s=0.0) is None
    actors["trainer rank 3"].die.remote()
    errors = []
    for ref in (actors["trainer rank 3"].work.remote(9.0), actors["the Buffer"].ask.remote([actors["trainer rank 3"]])):
        with pytest.raises((ray.exceptions.RayError, OSError)) as raised:
            ray.get(ref)
        errors.append(raised.value)
    for error in (*errors, OSError("Connection closed by peer")):
        death = registry.explain(error)
        assert isinstance(death, ActorDied)
        lines = str(death).splitlines()
        assert lines[0].startswith("trainer rank 3 died: its process ") and "trainer rank 3.log" in lines[0]
        assert lines[1:] == [f"line {number}" for number in range(10, 20)]
        origin = origin_of(death)
        assert origin is not None and origin.process == "trainer rank 3" and f"its process {origin.pid} " in lines[0]
    with pytest.raises(OSError, match="closed by peer") as raised:
        ray.get(actors["the Buffer"].fail.remote())
    registry.note_origin(raised.value)
    origin = origin_of(raised.value)
    assert origin is not None and (origin.process, origin.pid) == (
        "the Buffer",
        ray.get(actors["the Buffer"].pid.remote()),
    )
    # The first to die is the cause. Keys are hidden.
    time.sleep(0.1)
    actors["engine 1"].die.remote()
    time.sleep(1.0)
    assert "trainer rank 3" in str(registry.explain(OSError("closed")))
    replaced = actor_of(Worker)
    registry.add("trainer rank 3", replaced, tmp_path / "new.log")
    death = registry.explain(OSError("closed"))
    assert "engine 1 died" in str(death) and "key is ***" in str(death) and "s3cret" not in str(death)
    registry.clear()
    assert registry.explain(errors[0], patience_s=0.0) is None


def test_a_worker_is_a_fork_of_the_nursery(shared_cluster: Any, worker: Any) -> None:
    here = ray.get_runtime_context().get_node_id()
    assert ray.get(worker.facts.remote()) == (here, CLUSTER_TOKEN, shared_cluster.pid)


def test_a_worker_with_an_environment_of_its_own_is_no_fork(tmp_path: Path) -> None:
    """Ray's agent makes the environment, and starts only then.

    The nursery's forks have imported already, and know no other folders. What they import for Ray, Ray imports.
    """
    raylet = psutil.Process(ray._private.worker._global_node.all_processes["raylet"][0].process.pid)
    assert len([line for line in commands_under(raylet) if "ray_programs.py agent" in line]) == 2
    (tmp_path / "of_the_user.py").write_text("ANSWER = 42\n")

    def tell() -> tuple[Any, ...]:
        import of_the_user  # type: ignore[import-not-found]

        ray._private.worker.global_worker.get_serialization_context()
        return of_the_user.ANSWER, os.getppid(), os.environ.get("RAY_AUTH_TOKEN"), list(sys.modules)

    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    task = ray.remote(tell).options(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    *facts, modules = ray.get(task.remote())
    assert facts == [42, raylet.pid, CLUSTER_TOKEN]
    assert not set(WHEN_IT_ANSWERS) - set(modules), set(WHEN_IT_ANSWERS) - set(modules)
    assert any("RuntimeEnvAgent" in line for line in commands_under(raylet))


def commands_under(process: psutil.Process) -> list[str]:
    return [" ".join(child.cmdline()) for child in process.children()]


def test_a_rank_that_does_not_come_back_is_named_and_ends_the_wait(
    worker: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """--stall-timeout-s: the trainer of rank 1 is stopped (SIGSTOP), rank 0 is back."""
    ranks = [ray.remote(Worker).remote() for _ in range(2)]
    pids = [ray.get(rank.pid.remote()) for rank in ranks]
    registry = ActorRegistry()
    for number, rank in enumerate(ranks):
        registry.add(f"trainer rank {number}", rank, tmp_path / "log")
    launcher: Any = SimpleNamespace(registry=registry)
    nothing: Any = None  # engines cannot be asked, and a user's function blocks the Buffer
    buffer: Any = SimpleNamespace(is_started=True, actor=worker)
    monkeypatch.setattr("fusionrl.runtime.watchdog._ANSWER_S", 0.1)
    probes = ProgressProbes(launcher, nothing, buffer)
    supervisor = Supervisor(lambda is_generating: None, StopSignal(), interval_s=0.1)
    spans.record_to(tmp_path, "driver", 1)
    try:
        with Watchdog(tmp_path, 1, probes, floor_s=0.2, timeout_s=1.0) as watchdog:
            os.kill(pids[1], signal.SIGSTOP)
            with pytest.raises(KeyboardInterrupt) as raised, spans.phase("train"):
                supervisor.finish([rank.work.remote(0.0) for rank in ranks])
        error = watchdog.ended_by(raised.value)
        again = Watchdog(tmp_path, 2, probes, floor_s=0.2, timeout_s=1.0)
        with again, pytest.raises(KeyboardInterrupt), spans.phase("push"):
            get([ranks[1].work.remote(0.0)])  # the same of a wait that never looks up
    finally:
        spans.stop_recording()
        os.kill(pids[1], signal.SIGCONT)
        for rank in ranks:
            ray.kill(rank)
    for line in (error, again.verdict):
        assert re.search("; waits for trainer rank 1 of 2; the Buffer .* a user function may block", str(line))


def test_waits_that_are_all_short_are_enough_to_look(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model's phases take less than a second each; all engines and a stop request are looked at anyway."""
    looks = list[bool]()
    supervisor = Supervisor(looks.append, StopSignal(), interval_s=4.0)
    # Its clock is the test's: how fast the machine is makes no difference.
    now = 0.0
    monkeypatch.setattr("fusionrl.runtime.supervisor.time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(20):
        now += 1.0
        supervisor.wait(worker.work.remote(0.0))
        supervisor.finish([worker.work.remote(0.0)])
    assert len(looks) == 5, "after 1, 5, 9, 13 and 17 seconds"


def test_a_stalls_report_leaves_out_lost_engines_and_dead_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("fusionrl.runtime.watchdog._load", lambda name, *_: asked.append(name) or EngineLoad(name))
    monkeypatch.setattr("fusionrl.runtime.watchdog.look_on", lambda nodes, logs: asked.append(nodes) or [])
    evaluation = SimpleNamespace(urls=["c"])
    pool: Any = SimpleNamespace(urls=["a", "b"], evaluation=evaluation, left_out_numbers={0})
    launcher: Any = SimpleNamespace(api_key="key", bundles=[SimpleNamespace(node_id="ab" * 28)], run_dir=Path("run"))
    probes = ProgressProbes(launcher, pool, SimpleNamespace())  # type: ignore[arg-type]
    assert len(probes.engines()) == 2 and sorted(asked) == ["engine 1", "engine 2"]
    assert probes.elsewhere() == [] and len(asked) == 2, "the only other node is dead"


def test_processes_of_another_node_are_looked_at_by_a_task_there(tmp_path: Path) -> None:
    """This machine's node stands for the other."""
    with open(tmp_path / "trainer-5.a1.log", "ab") as log, subprocess.Popen(["sleep", "60"], stderr=log) as sleeper:
        try:
            (seen,) = look_on([ray.get_runtime_context().get_node_id(), "ab" * 28], tmp_path)  # one died by now
            assert (seen.role, seen.pid, seen.stacks) == ("trainer-5", sleeper.pid, "")
        finally:
            sleeper.kill()
