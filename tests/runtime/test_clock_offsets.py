"""The driver measures the clock of a process of each other machine, again after every step."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import ray

from fusionrl.observe import spans
from fusionrl.runtime import clock_offsets as module
from fusionrl.runtime.actor_registry import ActorRegistry
from fusionrl.runtime.clock_offsets import ClockOffsets

AHEAD_NS = 9_000_000_000


class Actor:
    """A process of a machine with the boot `boot`; None: it is dead."""

    def __init__(self, boot: str | None) -> None:
        self.clock, self._boot = SimpleNamespace(remote=lambda: self), boot

    def answer(self) -> tuple[str, int]:
        if self._boot is None:
            raise ray.exceptions.ActorDiedError
        return self._boot, time.monotonic_ns() + AHEAD_NS


def test_a_process_that_died_ends_no_step_and_its_successor_or_another_one_is_asked(tmp_path, monkeypatch) -> None:
    def get(actor: Actor, timeout: float) -> tuple[str, int]:
        return actor.answer()

    monkeypatch.setattr(module, "ray", SimpleNamespace(get=get))
    spans.record_to(tmp_path, "driver", 1)
    registry: Any = ActorRegistry()
    actors = {"engine 0": "boot-2", "engine 1": "boot-2", "engine 2": "boot-3", "trainer rank 0": None}
    for name, boot in actors.items():
        registry.add(name, Actor(boot), tmp_path)
    clocks, file = ClockOffsets(registry), tmp_path / "timeline" / "driver.a1.jsonl"

    def measured() -> list[str]:
        return [json.loads(line)[1] for line in file.read_text().splitlines()[1:]]

    clocks.find()
    assert measured() == ["boot-2", "boot-3"]
    *_, offset, error = json.loads(file.read_text().splitlines()[1])
    assert abs(offset - AHEAD_NS) <= error + 1_000 < 5_000_000
    registry.add("engine 0", Actor(None), tmp_path)
    registry.add("engine 2", Actor("boot-3"), tmp_path)
    clocks.measure()
    assert measured()[2:] == ["boot-3"]
    clocks.measure()
    assert measured()[3:] == ["boot-2", "boot-3"]
    spans.stop_recording()
