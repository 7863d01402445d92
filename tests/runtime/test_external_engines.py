"""Engines of others, as the list says: when they are pushed to, when they get requests, and how they leave.

Ray is real; the engines, the router and the pushes are not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from fusionrl.engines.external_engine import ExternalEngineFacts
from fusionrl.observe.engine_list import WANTED, add_wanted, read_states, remove_wanted
from fusionrl.runtime import external_engines
from fusionrl.runtime.external_engines import ExternalEngines
from tests.runtime.fakes import Router

A, B = "http://a:1", "http://b:2"
OWN_WEIGHTS = [{"w": "1"}]

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("shared_cluster")]


class Engine:
    """An engine whose state is a file: {"refuses": …, "fault": …, "running": n}; it notes that it was let go."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def _told(self, name: str) -> Any:
        return json.loads(self.path.read_text()).get(name) if self.path.exists() else None

    def join(self, expected: object = None, *own_weights: list[dict[str, str]]) -> ExternalEngineFacts:
        if own_weights and own_weights[0] != self._told("weights"):
            raise ValueError("its weights differ")
        if (reason := self._told("refuses")) is not None:
            raise ValueError(reason)
        return ExternalEngineFacts("0.5.23", 2, 1)

    def fault(self) -> str | None:
        fault: str | None = self._told("fault")
        return fault

    def num_running(self) -> int:
        return int(self._told("running") or 0)

    def release(self) -> None:
        self.path.with_suffix(".released").touch()


class Party:
    """A run's external, with what the run saw of them."""

    def __init__(self, folder: Path, pushes: bool = True) -> None:
        self.folder, self.said, self.served = folder, list[str](), list[list[str]]()
        self.router = Router([])
        config: Any = None
        plan: Any = SimpleNamespace(layout=object() if pushes else None, num_engines=5, eval_bundles=[])
        launcher: Any = SimpleNamespace(run_dir=folder, api_key="key", is_alone=True, make_local=self._make)
        own = SimpleNamespace(weight_checksums=SimpleNamespace(remote=lambda: ray.put(OWN_WEIGHTS)))
        pool: Any = SimpleNamespace(engines=[own])
        self.engines = ExternalEngines(
            config, plan, launcher, pool, self.said.append, lambda: self.served.append(self.engines.urls)
        )

    def _make(self, kind: type, name: str, index: int, url: str) -> Any:
        return ray.remote(Engine).options(num_cpus=0, max_concurrency=4).remote(str(self.path(url)))

    def path(self, url: str) -> Path:
        return self.folder / f"{url[7]}.json"

    def tell(self, url: str, **state: object) -> None:
        self.path(url).write_text(json.dumps(state))

    def states(self) -> dict[str, str]:
        return {state["url"]: state["state"] for state in read_states(self.folder)}

    def look_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, (self.states(), self.said)
            self.engines.look()
            time.sleep(0.05)

    def start(self, *urls: str) -> None:
        router: Any = self.router
        self.engines.start(router, list(urls))

    def serve(self, *urls: str) -> None:
        """Start engines, and give them requests as after the first push."""
        self.start(*urls)
        self.engines.admit()


@pytest.fixture(autouse=True)
def requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no model."""
    monkeypatch.setattr(external_engines, "engine_requirements", lambda *_: None)


@pytest.fixture
def party(tmp_path: Path) -> Party:
    return Party(tmp_path)


def test_weights_come_before_requests(party: Party) -> None:
    party.start(A)
    assert party.states() == {A: "ready"} and party.router.urls == []
    (target,) = party.engines.targets()
    assert (target.index, target.tp_size, target.host) == (5, 2, "a")
    party.engines.admit()
    assert party.router.urls == [A] == party.engines.urls and party.served == [[A]]
    add_wanted(party.folder, [B])
    party.look_until(lambda: party.states() == {A: "serving", B: "ready"})
    assert party.router.urls == [A] and [target.index for target in party.engines.targets()] == [5, 6]
    party.engines.admit()
    assert party.router.urls == [A, B] and party.served[-1] == [A, B]


def test_one_that_leaves_is_drained_and_gets_pushes_until_then(party: Party) -> None:
    party.serve(A, B)
    party.tell(A, running=3)
    remove_wanted(party.folder, [A])
    party.look_until(lambda: party.states()[A] == "leaving")
    assert party.router.urls == [B] and party.served[-1] == [B]
    for _ in range(10):
        party.engines.look()
        time.sleep(0.02)
    assert party.states()[A] == "leaving" and len(party.engines.targets()) == 2
    assert not party.path(A).with_suffix(".released").exists()
    party.tell(A, running=0)
    party.look_until(lambda: party.states()[A] == "gone")
    assert party.path(A).with_suffix(".released").exists() and len(party.engines.targets()) == 1
    add_wanted(party.folder, [A])  # it comes again, under another number: the sender knows no group with it
    party.look_until(lambda: party.states()[A] == "ready")
    assert [target.index for target in party.engines.targets()] == [6, 7]


def test_a_list_that_is_written_in_place_lets_nobody_go(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's `>` empties the file before it writes it."""
    monkeypatch.setattr(external_engines, "_MISSING_S", 60.0)  # this machine may be slow
    party.serve(A, B)
    whole = (party.folder / WANTED).read_text()
    for text in ("", "", whole, f"{A}\n", f"{A}\n", whole):
        (party.folder / WANTED).write_text(text)
        party.engines.look()
    assert party.states() == {A: "serving", B: "serving"} and party.served == [[A, B]]


def test_one_that_dies_is_lost_and_not_asked_again(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_engines, "_PROBE_INTERVAL_S", 0.05)
    party.serve(A, B)
    party.tell(A, fault="connection refused")
    party.look_until(lambda: party.states() == {A: "lost", B: "serving"})
    assert party.router.urls == [B] and "connection refused" in party.said[-1]
    party.tell(A)
    for _ in range(5):
        party.engines.look()
    assert party.states()[A] == "lost"
    remove_wanted(party.folder, [A])
    party.engines.look()
    add_wanted(party.folder, [A])
    party.look_until(lambda: party.states()[A] == "ready")


def test_a_push_that_failed_is_made_without_its_culprits(party: Party) -> None:
    party.serve(A)
    assert not party.engines.drop_culprits(RuntimeError("trainer 0: no memory"))
    add_wanted(party.folder, [B])
    party.look_until(lambda: party.states().get(B) == "ready")
    assert party.engines.drop_culprits(RuntimeError("engine 6: size mismatch"))  # it joined last
    assert party.states() == {A: "serving", B: "ready"}  # written with the next look
    party.engines.look()
    assert party.states() == {A: "serving", B: "lost"}
    party.tell(A, fault="dead")
    assert party.engines.drop_culprits(RuntimeError("engine 5: no answer"))
    assert party.engines.targets() == [] and party.router.urls == []


def test_one_that_lives_and_cannot_load_is_lost_and_not_the_run(party: Party) -> None:
    party.serve(A, B)
    party.tell(B, running=1)
    remove_wanted(party.folder, [B])
    party.look_until(lambda: party.states()[B] == "leaving")
    assert not party.engines.drop_culprits(RuntimeError("engine 55: it is one of the run's own"))
    assert party.engines.drop_culprits(RuntimeError(f"{A}: 500"))
    assert [target.index for target in party.engines.targets()] == [6] and party.router.urls == []
    assert party.engines.drop_culprits(RuntimeError("trainer 0: engine 6, rank 0: size mismatch"))
    assert party.engines.targets() == []


def test_one_that_the_router_takes_too_late_or_not_out(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=RuntimeError("the router is busy"))
    party.start(A, B)
    with monkeypatch.context() as patch:
        patch.setattr(Router, "add_worker", fail)
        party.engines.admit()
    assert party.states() == {A: "lost", B: "lost"} and party.router.told == [A, B]
    remove_wanted(party.folder, [A, B])
    party.engines.look()
    add_wanted(party.folder, [A])
    party.look_until(lambda: party.states()[A] == "ready")
    party.engines.admit()
    remove_wanted(party.folder, [A])
    with monkeypatch.context() as patch:
        patch.setattr(Router, "remove_worker", fail)
        party.engines.look()
    assert party.states()[A] == "serving" and party.router.urls == [A]
    party.look_until(lambda: party.states()[A] == "gone")
    assert party.router.urls == []


def test_one_that_does_not_fit_ends_the_run_if_the_flag_names_it(party: Party) -> None:
    party.start()
    party.tell(B, refuses="engine at http://b:2: it serves another model")
    add_wanted(party.folder, [B])
    party.look_until(lambda: party.states() == {B: "refused"})
    assert "it serves another model" in read_states(party.folder)[0]["note"]
    party.tell(A, refuses="engine at http://a:1: it serves another model")
    with pytest.raises(ValueError, match="--rollout-external-engine-addrs: engine at http://a:1: it serves another"):
        party.start(A)


def test_without_trainers_they_serve_at_once_if_they_have_the_weights_of_an_own_engine(tmp_path: Path) -> None:
    party = Party(tmp_path, pushes=False)
    party.tell(A, weights=[{"w": "2"}])
    party.tell(B, weights=OWN_WEIGHTS)
    with pytest.raises(ValueError, match="its weights differ"):
        party.start(A)
    remove_wanted(tmp_path, [A])
    party.start(B)
    assert party.engines.urls == [B] == party.router.urls


def test_files_that_cannot_be_read_or_written_change_nothing(party: Party, monkeypatch: Any, caplog: Any) -> None:
    fail = Mock(side_effect=OSError(28, "no space is left"))
    party.start(A)
    with monkeypatch.context() as patch:
        patch.setattr(external_engines, "read_wanted", fail)
        patch.setattr(external_engines, "write_states", fail)
        party.engines.admit()
        party.engines.look()
        assert party.engines.urls == [A] and caplog.text.count("no space is left") == 1
    assert party.states() == {A: "ready"}
    party.engines.look()
    assert party.states() == {A: "serving"}
    monkeypatch.setattr(external_engines, "write_states", fail)
    party.engines.release()
    assert party.path(A).with_suffix(".released").exists() and party.engines.targets() == []


def test_an_end_that_fails_holds_up_nobody(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    party.serve(A, B)
    monkeypatch.setattr(ray, "wait", Mock(side_effect=ray.exceptions.RaySystemError("the node is gone")))
    for _ in range(2):
        party.engines.release()
        assert party.engines.targets() == [] and party.states() == {A: "gone", B: "gone"}
