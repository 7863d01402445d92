"""Which engines are taken out, how they come back, and what ends the run. Ray is real, the engines are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.runtime.recovery import MAX_STARTS
from tests.runtime.fakes import Fleet

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("shared_cluster")]


@pytest.fixture
def fleet(tmp_path: Path) -> Callable[..., Fleet]:
    return lambda count=2, **settings: Fleet(tmp_path, count, **settings)


def nothing() -> None: ...


def test_a_dead_engine_leaves_the_router_at_once_and_comes_back_with_the_weights(fleet: Any) -> None:
    it = fleet(3)
    it.recovery.begin_round()
    assert it.recovery.check() == 0
    it.set(1, "dead")
    assert it.recovery.check(is_generating=False) == 1
    assert it.router.told == ["http://1.2"] and it.router.urls == ["http://0.1", "http://2.3"]
    assert (it.folder / "1.2.ended").read_text() == "0.0"  # by force: what waits for it must go on
    assert it.recovery.num_out == it.recovery.num_died == 1
    assert it.recovery.check() == 0  # it is not found a second time
    it.set(1, "well")
    assert it.recovery.finish_starts(nothing) == [1]
    assert it.recovery.finish_starts(nothing) == []
    assert "http://1.4" not in it.router.urls and it.urls[1] == "http://1.4"  # it has no weights yet
    assert it.recovery.num_out == 1
    it.recovery.join()
    assert it.router.urls == ["http://0.1", "http://2.3", "http://1.4"]
    assert it.recovery.num_out == 0 and it.recovery.num_restarts == {1: 1}
    assert [text for text in it.said if "engine 1" in text] == it.said and len(it.said) == 2
    assert it.recovery.check() == 0


def test_an_engine_that_hangs_is_found_in_a_round_alone(fleet: Any) -> None:
    it = fleet(first_wait=0.5)
    it.set(0, "hangs")
    assert it.recovery.check(is_generating=False) == 0
    it.recovery.begin_round()
    begin = time.monotonic()
    it.check_until(1)
    assert time.monotonic() - begin >= 0.5 + 0.5  # the first wait, and the time limit
    assert it.router.urls == ["http://1.2"]
    it.set(1, "hangs")
    with pytest.raises(RuntimeError, match="engine 1 made no token"):
        it.check_until(2)


@pytest.mark.parametrize("makes_tokens", [False, True])
def test_around_a_push_everyone_is_asked(fleet: Any, makes_tokens: bool) -> None:
    """One that has hung since its last token would hold a push up, and after one that failed each makes a token.

    Also an actor that is gone is a dead engine: a node that is lost takes both along. The death of all ends the run.
    """
    it = fleet(3, interval=1000.0)
    assert it.recovery.check_answers(makes_tokens=makes_tokens) == 0
    it.set(1, "hangs")
    it.engines[2].die.remote()
    assert it.recovery.check_answers(makes_tokens=makes_tokens) == 2
    assert it.router.urls == ["http://0.1"] and it.recovery.num_out == 2
    it.set(0, "hangs")
    with pytest.raises(RuntimeError, match="engine 0 made no token" if makes_tokens else "engine 0 did not answer"):
        it.recovery.check_answers(makes_tokens=makes_tokens)


def test_starts_are_tried_a_few_times(fleet: Any) -> None:
    it = fleet()
    it.set(0, "fails to start")
    it.set(1, "starts slowly")
    it.recovery._take_out(0, RuntimeError("as if dead"))
    with pytest.raises(RuntimeError, match=rf"engine 0 died, .* \({MAX_STARTS} tries\): no memory for engine 0"):
        it.recovery.finish_starts(nothing)
    assert it.number == 2 + MAX_STARTS
    it.set(0, "well")
    it.recovery._replace(0)
    assert it.recovery.finish_starts(nothing) == [0]
    it.recovery._take_out(1, RuntimeError("as if dead"))

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # Ctrl-C and SIGTERM need not wait for it
        it.recovery.finish_starts(stop)


def test_where_all_may_die_the_run_goes_on_without_them(fleet: Any) -> None:
    """Engines that evaluate; their numbers follow those of the policy's engines."""
    it = fleet(1, first=2, may_lose_all=True)
    it.set(0, "dead")
    assert it.recovery.check() == 1 and it.router.urls == [] and it.recovery.num_out == 1
    it.set(0, "well")
    assert it.recovery.check() == 0  # nobody is left to be asked
    assert it.recovery.finish_starts(nothing) == [0]
    it.recovery.join()
    assert it.router.urls == ["http://0.2"] and it.recovery.num_out == 0
    assert it.said[0].startswith("engine 2 is dead") and it.said[1:] == ["engine 2 is back"]
    it.set(0, "fails to start")
    it.recovery._take_out(0, RuntimeError("as if dead"))
    with pytest.raises(RuntimeError, match="engine 2 died, and could not be started again"):
        it.recovery.finish_starts(nothing)
