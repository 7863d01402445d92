"""The watchdog: a thread of the driver that warns when a phase takes much longer than usual.

It logs in one line what the driver waits for, since when, and how far the other processes are, and writes the stacks of
the run's processes into `logs/`, also those of stopped or blocked ones. Each probe of `ProgressProbes` has a time
limit, as the process that it asks may hang. The rules and the line are in `observe/stalls.py`.
"""

import logging
import re
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fusionrl.engines.http import call
from fusionrl.observe import spans
from fusionrl.observe.stalls import (
    FLOOR_S,
    EndedPhase,
    EngineLoad,
    Frame,
    LatePhase,
    Phase,
    ProcessState,
    StallClock,
    look,
    seconds,
    stall_line,
)
from fusionrl.runtime.buffer_handle import BufferHandle
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.launcher import Launcher
from fusionrl.weights.remote_calls import waited_for

logger = logging.getLogger(__name__)

_ANSWER_S = 3.0
_BETWEEN_S = 1.0  # two looks at an engine
_NODE_S = 20.0  # a Ray worker may have to start there
_MOST_ENGINES = 8  # that one line names


class ProgressProbes:
    """Functions that report how far a run is; each answers within seconds or not at all."""

    def __init__(self, launcher: Launcher, engines: EnginePool, buffer: BufferHandle) -> None:
        self._launcher, self._pool, self._buffer = launcher, engines, buffer

    def name_of(self, reference: object) -> str:
        """Return the name of the actor that a reference waits for; "" if it is done or belongs to no actor."""
        if not isinstance(reference, ray.ObjectRef) or ray.wait([reference], timeout=0, fetch_local=False)[0]:
            return ""
        actor = reference.task_id().actor_id().hex()
        return next((member.name for member in self._launcher.registry if member.id == actor), "")

    def sizes(self) -> Counter[str]:
        """Return the sizes of the groups of actors: "trainer rank" → 8."""
        return Counter(member.name.rpartition(" ")[0] for member in self._launcher.registry)

    def engines(self) -> Sequence[EngineLoad]:
        """Ask engines how busy they are: first faults, then engines without progress, the busiest first."""
        every_url, absent = [*self._pool.urls, *self._pool.evaluation.urls], self._pool.left_out_numbers
        urls = {index: url for index, url in enumerate(every_url) if index not in absent}
        if not urls:
            return []
        api_key = self._launcher.api_key
        with ThreadPoolExecutor(min(16, len(urls))) as threads:
            loads = list(threads.map(lambda item: _load(f"engine {item[0]}", item[1], api_key), urls.items()))
        loads.sort(key=lambda load: (not load.fault, load.tokens_per_s > 0, -load.running))
        return loads[:_MOST_ENGINES]

    def progress(self) -> Sequence[str]:
        """Ask the Buffer about rollouts and rewards, in words."""
        if not self._buffer.is_started:
            return []
        answer = self._buffer.actor.progress.remote()
        if not ray.wait([answer], timeout=_ANSWER_S)[0]:
            return [
                f"the Buffer has not started yet, or does not answer within {_ANSWER_S:g} s: a user function may block"
                " its event loop (a call that blocks, in an async function)"
            ]
        text = ray.get(answer)
        return [text] if text else []

    def elsewhere(self) -> Sequence[ProcessState]:
        """Look at the run's processes on its other nodes. A node that does not answer is left out."""
        if not ray.is_initialized():
            return []
        own_node = ray.get_runtime_context().get_node_id()
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        nodes = sorted({bundle.node_id for bundle in self._launcher.bundles} & living - {own_node})
        return look_on(nodes, self._launcher.run_dir / "logs") if nodes else []


def _load(name: str, url: str, api_key: str) -> EngineLoad:
    try:
        first = _numbers(url, api_key)
        time.sleep(_BETWEEN_S)
        second = _numbers(url, api_key)
    except RuntimeError:
        return EngineLoad(name, fault=f"does not answer within {_ANSWER_S:g} s")
    running, waiting, speed, tokens = second
    # A stalled scheduler keeps reporting its last numbers.
    return EngineLoad(name, int(running), int(waiting), 0.0 if tokens == first[3] else speed)


def _numbers(url: str, api_key: str) -> tuple[float, float, float, float]:
    """Requests running and waiting, tokens a second, and tokens in the KV cache, over its data-parallel parts. Raises
    RuntimeError if there is none, or it has another form."""
    answer = call("GET", f"{url}/v1/loads?include=core", api_key=api_key, timeout_s=_ANSWER_S)
    loads = answer.get("loads") if isinstance(answer, dict) else None
    if not isinstance(loads, list):
        raise RuntimeError(f"{url}/v1/loads answered in another form")

    def total(name: str) -> float:
        return float(sum(load.get(name) or 0.0 for load in loads))

    return total("num_running_reqs"), total("num_waiting_reqs"), total("gen_throughput"), total("num_used_tokens")


def look_on(nodes: Sequence[str], logs: Path) -> list[ProcessState]:
    """Look at the run's processes on nodes of the cluster."""
    task = ray.remote(num_cpus=0, num_gpus=0, max_retries=0)(look)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    looks = [task.options(scheduling_strategy=place).remote(logs) for place in places]
    done, late = ray.wait(looks, num_returns=len(looks), timeout=_NODE_S)
    for reference in late:
        ray.cancel(reference, force=True)
    seen: list[ProcessState] = []
    for reference in done:
        with suppress(ray.exceptions.RayError):  # the node dies now
            seen += ray.get(reference)
    return seen


T = TypeVar("T")

_WAKE_SIGNAL = signal.SIGRTMIN + 5  # to the driver's main thread; no other code sends it
_HIDDEN = ("weights/remote_calls.py", "runtime/watchdog.py", "observe/spans.py")


class Stalled(RuntimeError):
    """A phase took longer than --stall-timeout-s; the message is the watchdog's last line."""


@dataclass
class Watchdog:
    """A context manager: the thread lives within it. The main thread enters it."""

    logs: Path
    attempt: int
    probes: ProgressProbes
    floor_s: float = FLOOR_S  # --stall-warn-s
    timeout_s: float | None = None  # --stall-timeout-s
    end_trainers: Callable[[str], bool] | None = None
    """Called with the line where trainers alone are to blame, once in a phase: what waits for them fails then, and they
    come back. False: they would not."""

    def __post_init__(self) -> None:
        self.verdict: str | None = None
        """The line of the phase for which the run ends."""
        self._ended_in: Phase | None = None  # in which trainers were ended
        self._ended_at = 0.0
        self._num_reports = 0
        self._may_end = False  # without a handler the signal would end the process
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            signal.signal(_WAKE_SIGNAL, self._end_main_thread)
            self._may_end = True
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def ended_by(self, error: BaseException | None) -> Stalled | None:
        """Return the error in place of the one that has ended the run, where a stall did."""
        is_ours = isinstance(error, KeyboardInterrupt) and self.verdict is not None
        return Stalled(self.verdict) if is_ours else None

    def _end_main_thread(self, number: int, frame: FrameType | None) -> None:
        if self.verdict is not None and not self._is_over.is_set():
            raise KeyboardInterrupt  # the one that Ray's waits let through

    def _watch(self) -> None:
        clock = StallClock(self.floor_s, self.timeout_s)
        while not self._is_over.wait(min(1.0, self.floor_s / 10)):
            phases = spans.main_phases()
            phase = _phase(phases)
            event = clock.look(time.monotonic(), phase, phases.lasted)
            if isinstance(event, EndedPhase):
                logger.warning('"%s" has ended after %s', event.phase, seconds(event.seconds))
            elif event is not None and not self._is_ending(event, phase):
                self._speak(event, phase)
                if self.verdict is not None:
                    return

    def _is_ending(self, late: LatePhase, phase: Phase | None) -> bool:
        """Return whether trainers were ended for this phase a moment ago: Ray may not have told the driver yet."""
        is_same = late.is_last and phase == self._ended_in
        return is_same and time.monotonic() - self._ended_at < (self.timeout_s or 0.0)

    def _speak(self, late: LatePhase, phase: Phase | None) -> None:
        """Say the line; end the run where it is time, and the phase has not ended while the line was made."""
        names, seen = list[str](), list[ProcessState]()
        try:
            names, seen, line = self.report(late)
        except Exception as error:  # the watchdog survives anything that is broken in a stalled run
            logger.debug("the watchdog's line could not be made", exc_info=True)
            line = f'"{late.phase}" has taken {seconds(late.seconds)}; the cause is unknown ({error!r})'
        if self._is_over.is_set():
            return
        logger.warning("%s", line)
        if late.is_last and self._may_end and _phase(spans.main_phases()) == phase:
            line = f"{line}; --stall-timeout-s {self.timeout_s:g}"
            if phase != self._ended_in and self._end_trainers(line, names, seen):
                self._ended_in, self._ended_at = phase, time.monotonic()
                return
            self.verdict = line
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, _WAKE_SIGNAL)

    def _end_trainers(self, line: str, names: Sequence[str], seen: Sequence[ProcessState]) -> bool:
        return self.end_trainers is not None and are_trainers_to_blame(names, seen) and self.end_trainers(line)

    def report(self, late: LatePhase) -> tuple[list[str], list[ProcessState], str]:
        """Examine all processes and write the stacks. Return whom the driver waits for, the processes, and the line."""
        self._num_reports += 1
        items = [item if isinstance(item, str) else self.probes.name_of(item) for item in waited_for()]
        waits = [name for name in items if name]
        stacks = _stacks()
        seen = [*self._probe(lambda: look(self.logs)), *self._probe(self.probes.elsewhere)]
        progress, engines = self._probe(self.probes.progress), self._probe(self.probes.engines)
        place = _place(sys._current_frames().get(threading.main_thread().ident or 0))
        path = self.logs / f"stall-{self._num_reports}.a{self.attempt}.txt"

        def line_of(file: str) -> str:
            return stall_line(
                late,
                waits,
                seen,
                driver=place,
                progress=progress,
                engines=engines,
                sizes=self.probes.sizes(),
                file=file,
            )

        text = "\n".join([line_of(""), "", f"=== driver\n{stacks}", *(item.render() for item in seen)])
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:  # a full disk may be the cause: the line comes all the same
            return waits, seen, line_of(f"no file ({error.strerror})")
        return waits, seen, line_of(str(path))

    @staticmethod
    def _probe(ask: Callable[[], Sequence[T]]) -> Sequence[T]:
        try:
            return ask()
        except Exception as error:  # in a stalled run anything may be broken; ask the others
            logger.debug("the watchdog got no answer: %r", error)
            return []


_TRAINER = re.compile(r"^(trainer|critic|prm)\b")


def are_trainers_to_blame(waits: Sequence[str], seen: Sequence[ProcessState]) -> bool:
    """Return whether the driver waits for trainers, and no other process of the run is stopped or blocked.

    In a weight push trainers wait for engines: there one of them must be.
    """
    is_halted = ("stopped", "waits")
    troubled = {bool(_TRAINER.match(state.role)) for state in seen if state.trouble.startswith(is_halted)}
    is_push = any(": " in name for name in waits)
    return bool(waits) and all(map(_TRAINER.match, waits)) and False not in troubled and (bool(troubled) or not is_push)


def _phase(phases: spans.MainPhases) -> Phase | None:
    """The innermost phase of the driver's main thread; within one, between two others, the time since the first."""
    if phases.open is None:
        return None
    if phases.ended_ns > phases.open.start_ns:
        return Phase(f"{phases.open.name}, between its phases", phases.ended_ns / 1e9)
    return Phase(phases.open.name, phases.open.start_ns / 1e9)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(f"thread {names.get(id, id)}\n{''.join(traceback.format_stack(at))}" for id, at in frames)


def _place(innermost: FrameType | None) -> str:
    for entry in reversed(traceback.extract_stack(innermost) if innermost is not None else []):
        frame = Frame(entry.filename, entry.lineno or 0, entry.name)
        if frame.is_fusionrl and not entry.filename.endswith(_HIDDEN):
            return str(frame)
    return ""
