"""An engine over several nodes: an actor on each, of which the first serves.

The pool, the push and the recovery hold only the first actor. It starts and watches the other parts and ends as soon as
one of them does: an engine dies and is replaced as a whole.
"""

import logging
import threading
import time
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from fusionrl.engines.engine import EnginePart, EngineSpec, Files
from fusionrl.engines.process import ChildProcess
from fusionrl.runtime.actor_process import EngineWorker, ProcessSettings

logger = logging.getLogger(__name__)

_WATCH_S = 1.0  # between two looks at the other parts
_ANSWER_TIMEOUT_S = 15.0  # for a part's actor to answer
_END_TIMEOUT_S = 20.0
_WRITE_TIMEOUT_S = 120.0  # for a part's host to have the files of an adapter


class EnginePartWorker(EngineWorker, EnginePart):
    """The actor process of a part that does not serve."""

    def start_part(self, meeting: str, bootstrap_port: int | None = None) -> None:
        """Start the server on CPUs near its GPUs; see `EnginePart.start_part`."""
        self.open_hardware()
        super().start_part(meeting, bootstrap_port)


class MultiNodeEngineWorker(EngineWorker):
    """The actor process of part 0, which has the server that is asked."""

    def __init__(self, spec: EngineSpec, log: str, settings: ProcessSettings, parts: Sequence[ActorHandle]) -> None:
        super().__init__(spec, log, settings)
        self._parts = list(parts)
        self._starts: list[ray.ObjectRef] = []
        self._fault: str | None = None  # of a part, which ended the engine

    # ---- life

    def start(self) -> str:
        """Start all parts; see `EngineActor.start`. They are ended again when one of them cannot start."""
        self._fault = None
        try:
            url = super().start()
            ray.get(self._starts)
        except BaseException:  # also an end of the actor
            self.shutdown(0.0)
            raise
        assert self._server is not None
        threading.Thread(target=self._watch, args=(self._server,), daemon=True).start()
        return url

    def _spawn(self, ports: list[int]) -> ChildProcess:
        port, meeting_port, *bootstrap_ports = ports
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        rendezvous = f"{host}:{meeting_port}"
        server = self._spawn_server(port, meeting_port, rendezvous, *bootstrap_ports)
        self._starts = [part.start_part.remote(rendezvous, *bootstrap_ports) for part in self._parts]
        return server

    def _answers(self, path: str) -> bool:
        done, _ = ray.wait(self._starts, num_returns=len(self._starts), timeout=0) if self._starts else ([], [])
        ray.get(done)  # raises what kept a part from starting
        return super()._answers(path)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the servers of all parts; see `EngineActor.shutdown`. Idempotent."""
        super().shutdown(timeout_s)  # first: its ranks tell those of the others to end
        _wait([part.shutdown.remote(timeout_s) for part in self._parts])

    # ---- faults

    def _watch(self, server: ChildProcess) -> None:
        """End the server as soon as a part dies: clients fail at once, and not at the time limit of the collectives
        that the other ranks wait in."""
        while server.alive():
            if (fault := self._part_fault()) is not None:
                self._fault = f"{self.spec.name} is one over {self.spec.num_nodes} nodes, and ended: {fault}"
                logger.warning("%s", self._fault)
                server.terminate(timeout_s=0.0)
                return
            time.sleep(_WATCH_S)

    def _part_fault(self) -> str | None:
        for number, part in enumerate(self._parts, 1):
            try:
                fault = ray.get(part.fault.remote(), timeout=_ANSWER_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                continue  # a busy node; its server may be well
            except ray.exceptions.RayError as error:
                return f"the actor of its part {number} is dead ({error})"
            if fault is not None:
                return fault
        return None

    def _living(self, purpose: str) -> ChildProcess:
        if self._fault is not None:
            raise RuntimeError(f"{purpose}: {self._fault}")
        return super()._living(purpose)

    # ---- the hosts' copies of adapters, at the same place

    def write_files(self, folder: str, files: Files) -> None:
        writes = [part.write_files.remote(folder, files) for part in self._parts]
        super().write_files(folder, files)
        ray.get(writes, timeout=_WRITE_TIMEOUT_S)

    def remove_files(self, folder: str) -> None:
        ends = [part.remove_files.remote(folder) for part in self._parts]
        super().remove_files(folder)
        _wait(ends)

    # ---- the hosts' copies of the weights

    def pull_weights(self, folder: str, local_folder: str | None) -> str | None:
        """Bring the copy of every host of this engine to the version; None: one of them needs a full version."""
        pulls = [part.pull_weights.remote(folder, local_folder) for part in self._parts]
        paths = [super().pull_weights(folder, local_folder), *ray.get(pulls)]
        return None if None in paths else paths[0]

    def drop_local_copy(self, local_folder: str) -> None:
        ends = [part.drop_local_copy.remote(local_folder) for part in self._parts]
        super().drop_local_copy(local_folder)
        _wait(ends)


def _wait(refs: Sequence[ray.ObjectRef]) -> None:
    """Wait for calls and ignore their failures, such as those of dead actors."""
    if refs:
        ray.wait(list(refs), num_returns=len(refs), timeout=_END_TIMEOUT_S)
