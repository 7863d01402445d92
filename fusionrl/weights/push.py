"""The protocols of a weight push, run by the driver. After any failure the engines are released.

from memory  prepare, pause, begin, transfer, end, continue: the engines generate nothing from pause to continue
by files     write, pull, pause, load, continue: engines generate while trainers write and hosts pull
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusionrl.observe.spans import span
from fusionrl.plan.push_plan import EngineTarget, Feed
from fusionrl.weights.remote_calls import SendReport, WriteReport, future_of, wait_all

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 30.0


def push_weights(
    trainers: Sequence[ActorHandle],
    targets: Sequence[EngineTarget],
    feeds: Sequence[Feed],
    *,
    version: int,
    transport: str,
    pause_mode: str,
    timeout_s: float,
) -> dict[str, float]:
    """Bring every engine to the trainers' weights, stamped with `version`. Return the metrics.

    After a failure the engines resume with the weights they hold, so that they can be pushed to again or shut down.
    """
    start = time.perf_counter()
    push = PushCalls(trainers, targets, start + timeout_s)
    with span("prepare"):
        push.ask_trainers("prepare_push", list(targets), transport)
    prepared = time.perf_counter()
    not_released: list[str] = []
    try:
        with span("pause engines"):
            paused = push.pause(pause_mode)
        try:
            wait_all(push.engine_calls("begin_weight_update"), push.left())
            with span("transfer"):
                sent: list[SendReport] = push.ask_trainers(
                    "push_weights", list(targets), list(feeds), version, transport
                )
        finally:
            not_released += push.release("end_weight_update")
    finally:
        not_released += push.release("resume")
    if not_released:
        raise RuntimeError("weight push: " + "; ".join(not_released))
    end = time.perf_counter()
    return {
        "perf/time_sync_s": end - start,
        "sync/prepare_s": prepared - start,
        "sync/pause_s": end - paused,
        "sync/version": float(version),
        **_totals(sent, len(targets)),
    }


def push_adapters(
    trainers: Sequence[ActorHandle], targets: Sequence[EngineTarget], *, version: int, timeout_s: float
) -> dict[str, float]:
    """Bring every engine, which has the weights, to the trainers' adapters of `version`; metrics as `push_weights`.

    No engine pauses: running requests keep the version that they began with (`engines/adapter_versions.py`).
    """
    start = time.perf_counter()
    push = PushCalls(trainers, targets, start + timeout_s)
    with span("transfer"):
        sent: list[SendReport] = push.ask_trainers("push_adapters", list(targets), version, timeout_s)
    totals = _totals(sent, len(targets))
    seconds = time.perf_counter() - start
    return {
        "perf/time_sync_s": seconds,
        "sync/prepare_s": seconds - totals["sync/transfer_s"],
        "sync/pause_s": 0.0,
        "sync/version": float(version),
        **totals,
    }


@dataclass(frozen=True)
class PushCalls:
    """The calls of one push: its participants, and its deadline by time.perf_counter."""

    trainers: Sequence[ActorHandle]
    targets: Sequence[EngineTarget]
    deadline: float

    def left(self) -> float:
        """Seconds that the push may still take."""
        return max(1.0, self.deadline - time.perf_counter())

    def ask_trainers(self, method: str, *args: object) -> list[Any]:
        """Return the answers of all ranks."""
        calls = [(f"trainer {rank}", getattr(t, method).remote(*args)) for rank, t in enumerate(self.trainers)]
        return wait_all(calls, self.left())

    def engine_calls(self, method: str) -> list[tuple[str, ObjectRef]]:
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
        wait_all(calls, self.left())
        return min(times, default=time.perf_counter())

    def release(self, method: str) -> list[str]:
        """Call `method` on every engine, whatever its state; return the failures."""
        return call_failures(self.engine_calls(method), lambda: RELEASE_TIMEOUT_S)


def _totals(sent: Sequence[SendReport], num_engines: int) -> dict[str, float]:
    """Sums over the trainers' reports; of the clocks, which are one machine's or nearly so, the ends."""
    num_bytes = float(sum(report["bytes"] for report in sent))
    ends = [report for report in sent if "last_s" in report]
    seconds = max(report["last_s"] for report in ends) - min(report["first_s"] for report in ends)
    return {
        "sync/transfer_s": seconds,
        "sync/bytes": num_bytes,
        "sync/buckets": float(sum(report["buckets"] for report in sent)),
        "sync/calls": float(sum(report["calls"] for report in sent)),
        "sync/gb_per_s": num_bytes * num_engines / seconds / 1e9,
    }


def call_failures(calls: Sequence[tuple[str, Future[object] | ObjectRef]], timeout_s: Callable[[], float]) -> list[str]:
    """Wait for every call, also where one fails; log and return the failures."""
    failures = []
    for call in calls:
        try:
            wait_all([call], timeout_s())
        except RuntimeError as error:
            logger.warning("weight push: %s", error)
            failures.append(str(error))
    return failures


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


def push_by_disk(
    trainers: Sequence[ActorHandle],
    targets: Sequence[EngineTarget],
    *,
    version: int,
    local_folder: str | None,
    keep_files: bool,
    pause_mode: str,
    timeout_s: float,
) -> dict[str, float]:
    """Bring every engine to the trainers' weights, stamped with `version`, through files. Return the metrics.

    Targets with one `node_id` share a host's copy of the weights in `local_folder`; None: engines load what the
    trainers wrote. `keep_files`: the folders of older versions stay.

    After a failure the engines resume; one that did not load keeps its weights. The next push is an ordinary one.
    """
    start = time.perf_counter()
    push = _DiskPush(trainers, targets, start + timeout_s, version, local_folder)
    with span("write and pull"):
        written, paths, num_full = push.distribute()
    distributed = time.perf_counter()
    with span("load"):
        paused = push.load(paths, pause_mode)
    end = time.perf_counter()
    if not keep_files:
        wait_all([("trainer 0: drop_weights", trainers[0].drop_weights.remote(version))], push.left())
    num_bytes = float(sum(files["bytes"] for files in written))
    return {
        "perf/time_sync_s": end - start,
        "perf/update_weights_density": written[0]["density"],
        "perf/update_weights_wire_bytes": num_bytes,
        "sync/prepare_s": distributed - start,
        "sync/pause_s": end - paused,
        "sync/bytes": num_bytes,
        "sync/buckets": float(sum(files["files"] for files in written)),
        "sync/gb_per_s": num_bytes / (end - start) / 1e9,
        "sync/full_hosts": float(num_full),
        "sync/version": float(version),
    }


@dataclass(frozen=True)
class _DiskPush(PushCalls):
    version: int
    local_folder: str | None

    def distribute(self) -> tuple[list[WriteReport], dict[str, str | None], int]:
        """Write the files, and let each host pull them, while the engines generate.

        Returns rank 0's facts of what was written (a delta's, and a full version's where a host needs that), node →
        folder to load from, and the number of hosts that got a full version.
        """
        handles = [target.handle for target in self.targets]
        written: list[WriteReport] = self.ask_trainers("write_weights", self.version, handles)[:1]
        hosts = {target.node_id: target for target in reversed(self.targets)}  # one engine of each pulls for all
        paths = self._pull(hosts, written[0]["folder"])
        lacking = {node: target for node, target in hosts.items() if paths[node] is None}
        if lacking:
            logger.info("version %d goes in full to %d of %d hosts", self.version, len(lacking), len(hosts))
            written += self.ask_trainers("write_weights", self.version, handles, True)[:1]
            paths |= self._pull(lacking, written[1]["folder"])
        return written, paths, len(lacking)

    def load(self, paths: dict[str, str | None], pause_mode: str) -> float:
        """Pause the engines, load, and resume them. Return when the first of them paused."""
        failed, stamp = list[str](), str(self.version)
        try:
            paused = self.pause(pause_mode)
            loads = []
            for target in self.targets:
                load = target.handle.update_weights_from_disk
                loads.append((f"engine {target.index}: load", load.remote(paths[target.node_id], version=stamp)))
            # Wait for every load even if one fails: an engine resumes only with complete old or complete new weights.
            failed += call_failures(loads, self.left)
        finally:
            failed += self.release("resume")
        if failed:
            raise RuntimeError("weight push: " + "; ".join(failed))
        return paused

    def _pull(self, hosts: dict[str, EngineTarget], folder: str) -> dict[str, str | None]:
        """Host → the folder that its engines load; None where the delta in `folder` does not fit its copy."""
        calls = [
            (f"the host of engine {target.index}", target.handle.pull_weights.remote(folder, self.local_folder))
            for target in hosts.values()
        ]
        return dict(zip(hosts, wait_all(calls, self.left()), strict=True))


def drop_files(trainers: Sequence[ActorHandle], targets: Sequence[EngineTarget], local_folder: str | None) -> None:
    """At the end of a run: remove what versions are left, and the hosts' copies; gives up after ten seconds."""
    calls = [("trainer 0: drop_weights", trainers[0].drop_weights.remote(None))]
    if local_folder is not None:
        hosts = {target.node_id: target for target in targets}
        calls += [(f"engine {t.index}", t.handle.drop_local_copy.remote(local_folder)) for t in hosts.values()]
    deadline = time.monotonic() + _DROP_TIMEOUT_S
    call_failures(calls, lambda: max(0.0, deadline - time.monotonic()))
