"""The protocol of a weight push by files, run by the driver: write, pull, pause, load, continue.

Engines generate while trainers write and hosts pull; they pause only while they load.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusionrl.observe.spans import span
from fusionrl.plan.push import EngineTarget
from fusionrl.weights.push import PushCalls, call_failures
from fusionrl.weights.remote_calls import WriteReport, wait_all

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

_DROP_TIMEOUT_S = 10.0


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
    """Bring every engine to the trainers' weights, stamped with `version`, through files. Returns perf/… and sync/…

    perf/update_weights_density     share of the elements that travelled; 1 where the version is full
    perf/update_weights_wire_bytes  of the files, each counted once (sync/bytes is the same)
    sync/prepare_s                  trainers write and hosts pull, while the engines still generate
    sync/pause_s                    time from the first engine pausing until all have resumed
    sync/full_hosts                 hosts that a delta did not fit, and that got a full version

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
        written = [self._write("write_weights")]
        hosts = {target.node_id: target for target in reversed(self.targets)}  # one engine of each pulls for all
        paths = self._pull(hosts, written[0]["folder"])
        lacking = {node: target for node, target in hosts.items() if paths[node] is None}
        if lacking:
            logger.info("version %d goes in full to %d of %d hosts", self.version, len(lacking), len(hosts))
            written.append(self._write("write_full_weights"))
            paths |= self._pull(lacking, written[1]["folder"])
        return written, paths, len(lacking)

    def load(self, paths: dict[str, str | None], pause_mode: str) -> float:
        """Pause the engines, load, and resume them. Return when the first of them paused."""
        failed: list[str] = []
        try:
            paused = self.pause(pause_mode)
            stamp = str(self.version)
            loads = [
                (f"engine {t.index}: load", t.handle.update_weights_from_disk.remote(paths[t.node_id], version=stamp))
                for t in self.targets
            ]
            # Wait for every load even if one fails: an engine resumes only with complete old or complete new weights.
            failed += call_failures(loads, self.left)
        finally:
            failed += self.release("resume")
        if failed:
            raise RuntimeError("weight push: " + "; ".join(failed))
        return paused

    def _write(self, method: str) -> WriteReport:
        written: list[WriteReport] = self.ask_trainers(method, self.version, [t.handle for t in self.targets])
        return written[0]

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
