"""The driver's calls of a Buffer that dies: another one takes its place and is asked again. Ray is real."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fusionrl.buffer.collect import EngineEndpoints
from fusionrl.buffer.cursor import BufferStart, Cursor
from fusionrl.runtime.buffer_handle import BufferHandle
from fusionrl.runtime.restarts import Restarts
from fusionrl.runtime.supervisor import ActorDied, ActorRegistry
from fusionrl.weights.remote_calls import get

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("shared_cluster")]


class Buffer:
    """Keeps the calls that it got; the first `num_dead` of them die at `dies_at`."""

    def __init__(self, number: int, num_dead: int, dies_at: str, dies_again_at: str) -> None:
        self.number, self.got = number, list[Any]()
        self.dies_at = "" if number >= num_dead else dies_again_at if number and dies_again_at else dies_at

    def _note(self, method: str, *given: Any) -> tuple[int, list[Any]]:
        if method == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.got.append((method, *given))
        return self.number, self.got

    def pid(self) -> int:
        return os.getpid()

    def prepare(self) -> None:
        self._note("prepare")

    def setup(self, endpoints: EngineEndpoints, place: BufferStart | None = None) -> Any:
        return self._note("setup", endpoints.router_url, endpoints.engine_urls, place)

    def set_engines(self, urls: list[str], eval_urls: list[str]) -> Any:
        return self._note("set_engines")

    def begin_stream(self, num_trained: int) -> Any:
        return self._note("begin_stream", num_trained)

    def rollout_trained(self) -> bool:
        return bool(self._note("rollout_trained"))

    def weights_pushed(self, version: int) -> Any:
        return self._note("weights_pushed", version)

    def save(self, path: str, rollout_id: int) -> Any:
        return self._note("save", path, rollout_id)

    def ask_the_dead(self, dead: list[Any]) -> Any:
        return ray.get(dead[0].save.remote("", 0))


class World:
    """A handle, and the Buffers that it makes."""

    def __init__(
        self, dies_at: str, num_dead: int = 1, max_restarts: int = 3, interval: int = 1, dies_again_at: str = ""
    ) -> None:
        self.made, self.brought = list[Any](), list[int]()
        self._dies = num_dead, dies_at, dies_again_at
        registry, restarts = ActorRegistry(), Restarts(max_restarts)
        launcher: Any = SimpleNamespace(make_buffer=self._make, registry=registry, restarts=restarts)
        knobs: Any = SimpleNamespace(update_weights_interval=interval)
        supervisor: Any = SimpleNamespace(wait=get)
        self.launcher, self.handle = launcher, BufferHandle(SimpleNamespace(), supervisor, launcher, knobs)  # type: ignore[arg-type]
        self.handle.start()
        get(self.handle.setup(EngineEndpoints("http://router", ("http://a",))))

    def _make(self) -> Any:
        actor = ray.remote(Buffer).options(num_cpus=0).remote(len(self.made), *self._dies)
        self.made.append(actor)
        self.launcher.registry.add("the Buffer", actor, Path(os.devnull))
        return actor

    def got(self) -> tuple[int, list[Any]]:
        """(number of the Buffer that lives, the calls that it got)."""
        answer: Any = self.handle.call("set_engines", [], [])
        number, told = answer
        return number, told[:-1]


SETUP = ("setup", "http://router", ("http://b",))


def test_it_goes_on_after_the_last_rollout_that_is_done() -> None:
    it = World("save")
    it.handle.set_engines(["http://b"], [])
    cursors = [Cursor({"n": number}) for number in range(3)]
    for number, cursor in enumerate(cursors):
        it.handle._cursors.add(number, cursor)
    it.handle.last_done = 1  # the last one is not trained
    old = it.handle.ask("save", "x", 1)
    assert it.handle.call("save", "y", 1) == (1, [(*SETUP, BufferStart(1, cursors[1])), ("save", "y", 1)])
    assert it.handle.num_replaced == 1 and it.launcher.restarts.metrics() == {"run/restarts_buffer": 1.0}
    # A call of the old one fails, and its successor is left alone.
    answer: Any = it.handle.wait(old)
    assert answer[0] == 1 and it.handle.num_replaced == 1 and len(it.made) == 2
    # An actor that the Buffer asks and that is dead is not the Buffer, nor is one that dies while it is waited for.
    it.launcher.make_buffer = lambda: pytest.fail("a Buffer that lives was replaced")
    with pytest.raises(ray.exceptions.RayTaskError):
        it.handle.call("ask_the_dead", [it.made[0]])
    with pytest.raises(ray.exceptions.RayActorError):
        it.handle.wait(it.handle.ask("save", "z", 1), lambda ref: get(it.made[0].save.remote("", 0)))


def test_new_engines_are_kept_for_the_next_one() -> None:
    """It is replaced by the next call: what is trained meanwhile is done by then."""
    it = World("set_engines")
    it.handle.set_engines(["http://b"], [])
    assert it.handle.num_replaced == 0
    it.handle._cursors.add(0, Cursor({"n": 0}))
    it.handle.last_done = 0
    answer: Any = it.handle.call("save", "y", 0)
    assert answer == (1, [(*SETUP, BufferStart(0, Cursor({"n": 0}))), ("save", "y", 0)])


def test_one_that_hangs_is_found_and_one_that_is_dead_is_replaced() -> None:
    it = World("prepare", num_dead=0)
    it.handle.check(30)
    os.kill(ray.get(it.handle.actor.pid.remote()), signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="the Buffer does not answer within 1 s"):
        it.handle.check(1)
    ray.kill(it.handle.actor)
    it.handle.check(30)
    assert it.handle.num_replaced == 1


def test_a_question_whether_a_call_is_done_waits_for_nobody() -> None:
    """An evaluation in the background: its Buffer dies, and the next one begins it again."""
    it = World("save")
    started = it.handle.ask("save", "y", 0)
    ray.wait([started.ref])
    assert not it.handle.is_done(started) and it.handle.num_replaced == 1
    ray.wait([started.ref])
    assert it.handle.is_done(started)
    answer: Any = it.handle.wait(started)
    assert answer[0] == 1
    failed = it.handle.ask("ask_the_dead", [it.made[0]])
    ray.wait([failed.ref])
    assert it.handle.is_done(failed) and it.handle.num_replaced == 1


def test_before_the_first_rollout_it_begins_as_the_run_did() -> None:
    it = World("save")
    get(it.handle.actor.prepare.remote())
    it.handle._start, it.handle.last_done = BufferStart(4, checkpoint="buffer.json"), 4
    answer: Any = it.handle.call("save", "y", 4)
    number, told = answer
    assert number == 1 and told[0][-1] == BufferStart(4, checkpoint="buffer.json")


@pytest.mark.parametrize(
    ("max_restarts", "again", "prepare"),
    [
        *((number, again, lambda handle: None) for number, again in ((0, ""), (1, ""), (1, "setup"))),
        (3, "", lambda handle: setattr(handle, "last_done", 2)),
    ],
)
def test_what_it_died_of_is_raised(max_restarts: int, again: str, prepare: Callable[[BufferHandle], None]) -> None:
    """The limit is reached, also while the next one is set up, or no cursor says what is done."""
    it = World("save", num_dead=9, max_restarts=max_restarts, dies_again_at=again)
    prepare(it.handle)
    with pytest.raises(ActorDied, match=r"^the Buffer died: its process \d+ ended"):
        it.handle.call("save", "y", 1)
    assert len(it.made) == 1 + (max_restarts == 1)


@pytest.mark.parametrize(
    ("dies_at", "interval"), [("rollout_trained", 1), ("rollout_trained", 2), ("weights_pushed", 1)]
)
def test_a_stream_begins_again_with_the_weights_that_it_needs(dies_at: str, interval: int) -> None:
    it = World(dies_at, interval=interval)
    it.handle.begin_stream(it.brought.append)
    assert it.brought == [0]
    it.handle._cursors.add(0, Cursor({"n": 0}))
    it.handle.last_done = 0
    assert it.handle.rollout_trained() == (interval == 1)
    if interval == 1:
        it.handle.weights_pushed(1)
    else:  # the next fetch begins it
        it.handle._stream()
    assert it.brought == [0, 1] and it.got()[1][1:] == [("begin_stream", 1)]
