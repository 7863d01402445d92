"""The protocols of a weight push, run by the driver. After any failure the engines are released.

from memory  prepare, pause, begin, transfer, end, continue: the engines generate nothing from pause to continue
by files     write, pull, pause, load, continue: engines generate while trainers write and hosts pull
adapters     transfer: no engine pauses (`engines/adapter_versions.py`)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fusionrl.base.wording import headline
from fusionrl.observe.spans import span
from fusionrl.plan.push_plan import EngineTarget, Feed
from fusionrl.weights.remote_calls import SendReport, WriteReport, future_of, wait_all

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 30.0
_DROP_TIMEOUT_S = 10.0

METRICS = """
perf/time_sync_s | seconds | The weight push, without its verification.
perf/update_weights_density | share | Share of the weights' elements that travelled; 1 for a full version. |
    --update-weight-transport disk
perf/update_weights_wire_bytes | bytes | Size of the version's files. | --update-weight-transport disk
sync/version | version | Version of the weights that the engines have after the push: equal to `step`.
sync/prepare_s | seconds | Preparation, while the engines generate.
sync/pause_s | seconds | Time from the first engine pausing until all have resumed.
sync/transfer_s | seconds | From the first byte sent to the last one loaded, within the pause. | not by disk
sync/bytes | bytes | Bytes of the weights, each counted once.
sync/buckets | buckets | Parts in which they were sent; by disk, files.
sync/calls | calls | Calls of engines. | not by disk
sync/gb_per_s | 10^9 bytes/s | What all engines together received in a second of the transfer.
sync/full_hosts | hosts | Hosts that got the full version in place of a delta. | --update-weight-transport disk
"""


@dataclass(frozen=True)
class Push:
    """One push, which brings `targets` to the trainers' weights or adapters and stamps them with `version`.

    One of its three protocols is called, once, and returns the metrics. After a failure the engines resume with the
    weights that they hold, so that they can be pushed to again or shut down.
    """

    trainers: Sequence[ActorHandle]
    targets: Sequence[EngineTarget]
    version: int
    timeout_s: float
    start: float = field(default_factory=time.perf_counter)

    def from_memory(self, feeds: Sequence[Feed], transport: str, pause_mode: str) -> dict[str, float]:
        """Send the weights by `transport`; `feeds` as of `plan_feeds`, where engines read GPUs that they share."""
        with span("prepare"):
            self._ask_trainers("prepare_push", list(self.targets), transport)
        prepared = time.perf_counter()
        not_released: list[str] = []
        try:
            with span("pause engines"):
                paused = self.pause(pause_mode)
            try:
                wait_all(self._engine_calls("begin_weight_update"), self._left())
                with span("transfer"):
                    sent: list[SendReport] = self._ask_trainers(
                        "push_weights", list(self.targets), list(feeds), self.version, transport
                    )
            finally:
                not_released += self._release("end_weight_update")
        finally:
            not_released += self._release("resume")
        if not_released:
            raise _failure(not_released)
        end = time.perf_counter()
        return self._times(end, prepared - self.start, end - paused) | _totals(sent, len(self.targets), end - paused)

    def of_adapters(self) -> dict[str, float]:
        """Send the adapters; the engines have the weights. Running requests keep the version that they began with."""
        with span("transfer"):
            sent: list[SendReport] = self._ask_trainers(
                "push_adapters", list(self.targets), self.version, self.timeout_s
            )
        end = time.perf_counter()
        totals = _totals(sent, len(self.targets), end - self.start)
        return self._times(end, end - self.start - totals["sync/transfer_s"], 0.0) | totals

    def by_disk(self, local_folder: str | None, pause_mode: str, *, keep_files: bool) -> dict[str, float]:
        """Send the weights through files.

        Targets with one `node_id` share a host's copy of the weights in `local_folder`; None: engines load what the
        trainers wrote. `keep_files`: the folders of older versions stay. After a failure an engine that did not load
        keeps its weights, and the next push is an ordinary one.
        """
        with span("write and pull"):
            written, paths, num_full = self._distribute(local_folder)
        distributed = time.perf_counter()
        with span("load"):
            paused = self._load(paths, pause_mode)
        end = time.perf_counter()
        if not keep_files:
            dropping = self.trainers[0].drop_weights.remote(self.version)
            wait_all([("trainer 0: drop_weights", dropping)], self._left())
        num_bytes = float(sum(files["bytes"] for files in written))
        return self._times(end, distributed - self.start, end - paused) | {
            "perf/update_weights_density": written[0]["density"],
            "perf/update_weights_wire_bytes": num_bytes,
            "sync/bytes": num_bytes,
            "sync/buckets": float(sum(files["files"] for files in written)),
            "sync/gb_per_s": num_bytes / (end - self.start) / 1e9,
            "sync/full_hosts": float(num_full),
        }

    # ------------------------------------------------------------------------------------ parts
    def _times(self, end: float, prepare_s: float, pause_s: float) -> dict[str, float]:
        return {
            "perf/time_sync_s": end - self.start,
            "sync/prepare_s": prepare_s,
            "sync/pause_s": pause_s,
            "sync/version": float(self.version),
        }

    def _left(self) -> float:
        """Seconds that the push may still take."""
        return max(1.0, self.start + self.timeout_s - time.perf_counter())

    def _ask_trainers(self, method: str, *args: object) -> list[Any]:
        """Return the answers of all ranks."""
        trainers = enumerate(self.trainers)
        calls = [(f"trainer {rank}: {method}", getattr(t, method).remote(*args)) for rank, t in trainers]
        return wait_all(calls, self._left())

    def _engine_calls(self, method: str) -> list[tuple[str, ObjectRef]]:
        """Begin a call of every engine."""
        return [(f"engine {t.index}: {method}", getattr(t.handle, method).remote()) for t in self.targets]

    def pause(self, mode: str) -> float:
        """Pause all engines; return when the first of them paused, by `time.perf_counter`.

        An engine that generates ends its forward pass before it pauses: that is work, and no pause.
        """
        times = list[float]()
        calls = [(f"engine {t.index}: pause", future_of(t.handle.pause.remote(mode))) for t in self.targets]
        for _, call in calls:
            call.add_done_callback(lambda _: times.append(time.perf_counter()))
        wait_all(calls, self._left())
        return min(times, default=time.perf_counter())

    def _release(self, method: str) -> list[str]:
        """Call `method` on every engine, whatever its state; return the failures."""
        return _call_failures(self._engine_calls(method), lambda: _RELEASE_TIMEOUT_S)

    def _distribute(self, local_folder: str | None) -> tuple[list[WriteReport], dict[str, str | None], int]:
        """Write the files, and let each host pull them, while the engines generate.

        Returns rank 0's facts of what was written (a delta's, and a full version's where a host needs that), node →
        folder to load from, and the number of hosts that got a full version.
        """
        handles = [target.handle for target in self.targets]
        written: list[WriteReport] = self._ask_trainers("write_weights", self.version, handles)[:1]
        hosts = {target.node_id: target for target in reversed(self.targets)}  # one engine of each pulls for all
        paths = self._pull(hosts, written[0]["folder"], local_folder)
        lacking = {node: target for node, target in hosts.items() if paths[node] is None}
        if lacking:
            logger.info("version %d goes in full to %d of %d hosts", self.version, len(lacking), len(hosts))
            written += self._ask_trainers("write_weights", self.version, handles, True)[:1]
            paths |= self._pull(lacking, written[1]["folder"], local_folder)
        return written, paths, len(lacking)

    def _pull(self, hosts: dict[str, EngineTarget], folder: str, local_folder: str | None) -> dict[str, str | None]:
        """Host → the folder that its engines load; None where the delta in `folder` does not fit its copy."""
        calls = [
            (f"the host of engine {target.index}", target.handle.pull_weights.remote(folder, local_folder))
            for target in hosts.values()
        ]
        return dict(zip(hosts, wait_all(calls, self._left()), strict=True))

    def _load(self, paths: dict[str, str | None], pause_mode: str) -> float:
        """Pause the engines, load, and resume them. Return when the first of them paused."""
        failed, stamp = list[str](), str(self.version)
        try:
            paused = self.pause(pause_mode)
            loads = []
            for target in self.targets:
                load = target.handle.update_weights_from_disk
                loads.append((f"engine {target.index}: load", load.remote(paths[target.node_id], version=stamp)))
            # Wait for every load even if one fails: an engine resumes only with complete old or complete new weights.
            failed += _call_failures(loads, self._left)
        finally:
            failed += self._release("resume")
        if failed:
            raise _failure(failed)
        return paused


def _totals(sent: Sequence[SendReport], num_engines: int, longest_s: float) -> dict[str, float]:
    """Sums over the trainers' reports; of the clocks, which are one machine's or nearly so, the ends.

    A clock may be set meanwhile: the time is over 0, and `longest_s` at most.
    """
    num_bytes = float(sum(report["bytes"] for report in sent))
    ends = [report for report in sent if "last_s" in report]
    seconds = max(report["last_s"] for report in ends) - min(report["first_s"] for report in ends)
    seconds = min(max(seconds, 1e-6), longest_s)
    return {
        "sync/transfer_s": seconds,
        "sync/bytes": num_bytes,
        "sync/buckets": float(sum(report["buckets"] for report in sent)),
        "sync/calls": float(sum(report["calls"] for report in sent)),
        "sync/gb_per_s": num_bytes * num_engines / seconds / 1e9,
    }


def _call_failures(
    calls: Sequence[tuple[str, Future[object] | ObjectRef]], timeout_s: Callable[[], float]
) -> list[str]:
    """Wait for every call, also where one fails; log and return the failures."""
    failures = []
    for call in calls:
        try:
            wait_all([call], timeout_s())
        except RuntimeError as error:
            logger.warning("weight push: %s", headline(str(error)))
            failures.append(str(error))
    return failures


def _failure(failures: Sequence[str]) -> RuntimeError:
    """Return the error with all failures. The end of a log, which several calls of a dead engine quote, comes once."""
    heads = [headline(text) for text in failures]
    ends = (text.removeprefix(head) for text, head in zip(failures, heads, strict=True))
    return RuntimeError("weight push: " + "; ".join(heads) + next(filter(None, ends), ""))


def drop_files(trainers: Sequence[ActorHandle], targets: Sequence[EngineTarget], local_folder: str | None) -> None:
    """At the end of a run: remove what versions are left, and the hosts' copies; gives up after ten seconds."""
    calls = [("trainer 0: drop_weights", trainers[0].drop_weights.remote(None))]
    if local_folder is not None:
        hosts = {target.node_id: target for target in targets}
        calls += [(f"engine {t.index}", t.handle.drop_local_copy.remote(local_folder)) for t in hosts.values()]
    deadline = time.monotonic() + _DROP_TIMEOUT_S
    _call_failures(calls, lambda: max(0.0, deadline - time.monotonic()))
