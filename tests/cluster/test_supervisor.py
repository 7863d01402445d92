"""While trainers work or engines generate: a stop request is heard, and an engine that dies is noticed. Ray is real."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fusionrl.cluster.engine_pool import EnginePool
from fusionrl.cluster.ray_cluster import start_ray
from fusionrl.cluster.roster import ActorDied, Roster
from fusionrl.cluster.supervisor import Supervisor
from fusionrl.driver.signals import StopSignal, Terminated

WORK_S = 3.0


class Worker:
    """A trainer or a Buffer: works for a while, or fails at once."""

    def __init__(self, log: str = os.devnull) -> None:
        with open(log, "a") as file:
            file.write("key is s3cret\n")

    def work(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    def fail(self) -> None:
        raise OSError("Connection closed by peer")

    def ask(self, other: Any) -> Any:
        return ray.get(other[0].work.remote(0.0))

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Engine:
    """Dead as soon as its file is there."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def check_alive(self) -> None:
        if self.path.exists():
            raise RuntimeError("generation of engine 1 at http://e: the process ended (killed by SIGKILL)")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start_ray("cpu", 1, address=None, dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with StopSignal() as signal_:
        yield signal_


def actor_of(cls: type, *args: Any) -> Any:
    """An actor that has started."""
    actor = ray.remote(cls).options(num_cpus=0, max_concurrency=2).remote(*args)
    ray.get(actor.__ray_ready__.remote())
    return actor


def pool_of(folder: Path) -> EnginePool:
    """Two engines without --use-fault-tolerance."""
    nothing: Any = SimpleNamespace()
    pool = EnginePool(nothing, nothing, nothing)
    pool.engines = [actor_of(Engine, str(folder / str(index))) for index in range(2)]
    ray.get([engine.check_alive.remote() for engine in pool.engines])
    return pool


def supervisor_of(folder: Path, stop: StopSignal) -> Supervisor:
    return Supervisor(pool_of(folder).check, stop, interval_s=0.1)


def later(action: Any, *args: Any) -> None:
    threading.Timer(0.5, action, args).start()


def test_an_engine_that_dies_while_trainers_work_is_noticed_then(tmp_path: Path, stop: StopSignal) -> None:
    supervisor, trainer = supervisor_of(tmp_path, stop), actor_of(Worker)
    assert supervisor.finish([trainer.work.remote(0.2), trainer.work.remote(0.0)]) == ["done", "done"]
    later((tmp_path / "1").touch)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="engine 1 at http://e: the process ended"):
        supervisor.finish([trainer.work.remote(30.0)])
    assert time.monotonic() - start < 10.0


def test_a_stop_request_is_heard_while_trainers_work(
    tmp_path: Path, stop: StopSignal, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told at once. The training goes to its end, and no engine is needed any more."""
    supervisor, trainer = supervisor_of(tmp_path, stop), actor_of(Worker)
    heard_after: list[float] = []
    caplog.handler.addFilter(lambda record: heard_after.append(time.monotonic()) or True)  # type: ignore[func-returns-value]
    start = time.monotonic()
    later(os.kill, os.getpid(), signal.SIGTERM)
    threading.Timer(1.0, (tmp_path / "0").touch).start()
    assert supervisor.finish([trainer.work.remote(WORK_S)]) == ["done"]
    assert caplog.text.count("SIGTERM: this rollout is trained to its end") == 1
    assert heard_after[0] - start < WORK_S - 1.0
    with pytest.raises(Terminated):
        stop.check()


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """A shell's background job ignores SIGINT, and so would a test in it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_ends_a_training_at_once(tmp_path: Path, stop: StopSignal) -> None:
    """Also as the second SIGTERM."""
    supervisor, trainer = supervisor_of(tmp_path, stop), actor_of(Worker)
    for number in (signal.SIGINT, signal.SIGTERM):
        start = time.monotonic()
        if number == signal.SIGTERM:
            os.kill(os.getpid(), number)  # the first one; the system makes one of two that nobody has taken yet
            while not stop.hear():
                time.sleep(0.01)
        later(os.kill, os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            supervisor.finish([trainer.work.remote(20.0)])
        assert time.monotonic() - start < 10.0
        trainer = actor_of(Worker)


def test_a_stop_request_ends_a_rollout(tmp_path: Path, stop: StopSignal) -> None:
    supervisor, buffer = supervisor_of(tmp_path, stop), actor_of(Worker)
    later(os.kill, os.getpid(), signal.SIGTERM)
    with pytest.raises(Terminated):
        supervisor.wait(buffer.work.remote(30.0))


def test_a_stop_request_does_not_hide_an_error(tmp_path: Path, stop: StopSignal) -> None:
    supervisor, buffer = supervisor_of(tmp_path, stop), actor_of(Worker)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(OSError, match="Connection closed"):
        supervisor.wait(buffer.fail.remote())


def test_of_an_engine_that_dies_the_death_is_reported_and_not_its_consequences(
    tmp_path: Path, stop: StopSignal
) -> None:
    supervisor, buffer = supervisor_of(tmp_path, stop), actor_of(Worker)
    with pytest.raises(OSError, match="Connection closed"):
        supervisor.wait(buffer.fail.remote())
    (tmp_path / "1").touch()
    with pytest.raises(RuntimeError, match="engine 1"):
        supervisor.wait(buffer.fail.remote())


def test_a_dead_actor_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    """Behind its own error, behind one of an actor that asked it, and behind a closed connection."""
    roster = Roster()
    roster.hide(["s3cret", None])
    names = ["trainer rank 0", "trainer rank 3", "the Buffer", "engine 1"]
    actors = {name: actor_of(Worker, str(tmp_path / f"{name}.log")) for name in names}
    for name, actor in actors.items():
        roster.add(name, actor, tmp_path / f"{name}.log")
        ray.get(actor.work.remote(0.0))
    with (tmp_path / "trainer rank 3.log").open("a") as log:
        log.write("".join(f"line {number}\n" for number in range(20)))
    assert roster.explain(OSError("a user's"), patience_s=0.0) is None
    actors["trainer rank 3"].die.remote()
    errors = []
    for ref in (actors["trainer rank 3"].work.remote(9.0), actors["the Buffer"].ask.remote([actors["trainer rank 3"]])):
        with pytest.raises((ray.exceptions.RayError, OSError)) as raised:
            ray.get(ref)
        errors.append(raised.value)
    for error in (*errors, OSError("Connection closed by peer")):
        death = roster.explain(error)
        assert isinstance(death, ActorDied)
        lines = str(death).splitlines()
        assert lines[0].startswith("trainer rank 3 died: its process ") and "trainer rank 3.log" in lines[0]
        assert lines[1:] == [f"line {number}" for number in range(10, 20)]
    # The first to die is the cause. Keys are hidden.
    time.sleep(0.1)
    actors["engine 1"].die.remote()
    time.sleep(1.0)
    assert "trainer rank 3" in str(roster.explain(OSError("closed")))
    replaced = actor_of(Worker)
    roster.add("trainer rank 3", replaced, tmp_path / "new.log")
    death = roster.explain(OSError("closed"))
    assert "engine 1 died" in str(death) and "key is ***" in str(death) and "s3cret" not in str(death)
    roster.clear()
    assert roster.explain(errors[0], patience_s=0.0) is None
