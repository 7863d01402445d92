"""Calls within one process: queued, overlapping and failing as those of Ray's actors."""

import asyncio
import threading
from concurrent.futures import Future

import pytest
from ray.exceptions import RayTaskError

from fusionrl.weights.remote_calls import LocalActor, LocalRef, end, get, put, wait, wait_all


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start
        self.entered = threading.Event()
        self.go = threading.Event()

    def add(self, number: int, *, times: int = 1) -> int:
        self.value += number * times
        return self.value

    def hold(self) -> str:
        self.entered.set()
        assert self.go.wait(10)
        return threading.current_thread().name

    def release(self) -> None:
        self.go.set()

    def fail(self) -> None:
        raise ValueError("no such thing")

    async def later(self, other: LocalRef) -> int:
        await asyncio.sleep(0)
        return self.value + await other


def test_calls_of_one_thread_queue_in_order() -> None:
    actor = LocalActor(lambda: Counter(1), "trainer")
    refs = [actor.add.remote(2), actor.add.remote(3, times=2)]
    assert get(refs) == [3, 9]
    actor.release.remote()
    assert get(actor.hold.remote()) == "trainer-0", "as the only thread of a trainer's actor"
    end(actor)


def test_calls_of_several_threads_overlap() -> None:
    actor = LocalActor(lambda: Counter(0), "engine", 2)
    held = actor.hold.remote()
    done, pending = wait([held], timeout=0.05)
    assert not done and pending == [held]
    get(actor.release.remote())
    assert get(held).startswith("engine-")


def test_an_async_method_awaits_references() -> None:
    actor = LocalActor(lambda: Counter(40), "buffer")
    assert get(actor.later.remote(put(2))) == 42
    end(actor)


def test_what_a_call_raises_is_raised_by_who_waits() -> None:
    actor = LocalActor(lambda: Counter(0), "trainer")
    with pytest.raises(ValueError, match="no such thing"):
        get(actor.fail.remote())
    with pytest.raises(ValueError, match="no such thing"):
        get([actor.add.remote(1), actor.fail.remote()])
    with pytest.raises(RuntimeError, match="trainer 0: no such thing"):
        wait_all([("trainer 0", actor.fail.remote())], 5.0)
    of_ray: Future[None] = Future()  # its text is the traceback of another process
    of_ray.set_exception(RayTaskError("push", "Traceback ...", OSError("no room")).as_instanceof_cause())
    with pytest.raises(RuntimeError, match="^trainer 1: no room$"):
        wait_all([("trainer 1", of_ray)], 5.0)
    with pytest.raises(ZeroDivisionError):
        LocalActor(lambda: 1 // 0, "broken")


def test_a_wait_ends_with_the_first() -> None:
    actor = LocalActor(lambda: Counter(0), "engine", 2)
    held, quick = actor.hold.remote(), actor.add.remote(1)
    done, pending = wait([held, quick], num_returns=1, timeout=5)
    assert done == [quick] and pending == [held]
    with pytest.raises(TimeoutError):
        get(held, timeout=0.05)
    actor.release.remote()
    assert len(wait([held, quick], num_returns=2, timeout=5)[0]) == 2
    assert get([]) == []


def test_private_names_are_no_methods() -> None:
    actor = LocalActor(lambda: Counter(0), "x")
    with pytest.raises(AttributeError):
        actor._nothing.remote()
