"""An engine's actor process; apart from the others', so that it imports nothing of the Buffer and the trainers."""

from fusionrl.engines.engine import EngineActor, EngineSpec
from fusionrl.observe.hardware import resident_bytes
from fusionrl.runtime.actor_process import (
    HOST,
    HOST_PEAK,
    ActorProcess,
    ProcessHardware,
    ProcessSettings,
    log_to,
    record_host_memory,
)


class EngineWorker(ActorProcess, EngineActor):
    """An engine's actor process."""

    def __init__(self, spec: EngineSpec, log: str, settings: ProcessSettings) -> None:
        settings.apply()
        log_to(log, spec.log_name.removesuffix(".log"))
        self._binds = settings.numa_affinity
        super().__init__(spec)

    def start(self) -> str:
        """Start the server on CPUs near its GPUs: it inherits those of this thread."""
        self.open_hardware()
        return super().start()

    def open_hardware(self) -> None:
        """Find the devices, and take CPUs near them."""
        if self._hardware is None:
            ordinals = self.spec.gpu_ids if self.spec.device == "cuda" else ()
            self._hardware = ProcessHardware(ordinals, binds=self._binds)

    def hardware(self) -> dict[str, float]:
        """Return the numbers of its devices since the last call, and the host memory of its server."""
        if self._hardware is None or self._server is None:
            return {}
        numbers = self._hardware.take()
        numbers.pop(HOST_PEAK)  # of this process; the server's is its own
        return record_host_memory(
            numbers | {HOST: numbers[HOST] + resident_bytes(self._server.pid, with_children=True)}
        )
