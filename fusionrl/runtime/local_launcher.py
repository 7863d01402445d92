"""`LocalLauncher`: the parts of a run in this process (--in-process); engines' servers and the router are children."""

import os
import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from ray.actor import ActorHandle

from fusionrl.base.environment import MKL_MODE
from fusionrl.base.process import raise_open_files
from fusionrl.base.sockets import LOOPBACK, collective_interfaces
from fusionrl.buffer.actor import BufferActor
from fusionrl.config.config import Config
from fusionrl.engines.engine import EngineActor
from fusionrl.plan.devices import VARIABLE, Gpu, nth
from fusionrl.plan.trainers import Role
from fusionrl.runtime.engine_specs import EngineRole
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.ray_cluster import Bundle
from fusionrl.runtime.worker_actors import TRAINER_WORKERS
from fusionrl.weights.remote_calls import LocalActor, end, put

_ENGINE_THREADS = 8  # as the Ray actor of an engine answers so many calls at once


class LocalLauncher(Launcher):
    """Makes local actors instead of Ray actors. They write to the driver's log."""

    _is_running = False

    @property
    def is_running(self) -> bool:
        return self._is_running

    def start(self, on_ray: Callable[[], None] = lambda: None) -> None:
        """Take over the environment that actors have under Ray; there is nothing else to start."""
        plan = self._plan
        raise_open_files()
        self._early_start.begin(self._config, plan.device)
        self._inherits = False  # `_env` is for this process
        self._is_running = True
        os.environ.update(self._env())
        os.environ.update(collective_interfaces(LOOPBACK, os.environ))
        os.environ["OMP_NUM_THREADS"] = str(plan.train_num_threads)
        os.environ.setdefault(*MKL_MODE)
        if plan.layout is not None:
            # Here, for where the threads of trainer and Buffer import it at once, one may find sympy half imported.
            import_module("torch.fx.experimental.symbolic_shapes")
        visible = os.environ.get(VARIABLE)
        for number in range(plan.num_bundles):
            gpu = Gpu(number, number) if plan.device == "cpu" else nth(visible, number)
            self.bundles.append(Bundle(number, number, socket.gethostname(), LOOPBACK, gpu))

    def make_engine(self, role: EngineRole, index: int) -> ActorHandle:
        _, (spec,) = self._engine_specs(role, index)
        return self._add(spec.name, LocalActor(lambda: EngineActor(spec), spec.name, _ENGINE_THREADS))

    def _make_group(self, config: Config, bundles: Sequence[int], role: Role | None = None) -> list[ActorHandle]:
        (number,) = bundles  # the checks refuse more than one rank
        bundle, worker = self.bundles[number], TRAINER_WORKERS[role]
        arguments = (config, self._plan, 0, str(self.run_dir), bundle.gpu.ordinal, LOOPBACK, None)
        return [self._add("trainer rank 0", LocalActor(lambda: worker(*arguments), "trainer"))]

    def make_buffer(self) -> ActorHandle:
        arguments = (self._config, self._plan, str(self.run_dir), self._attempt, put)
        return self._add("the Buffer", LocalActor(lambda: BufferActor(*arguments), "buffer"))

    def _add(self, name: str, actor: LocalActor) -> ActorHandle:
        self.registry.add(name, actor, Path(self._log("driver")))
        return actor

    def _end_ray(self) -> None:
        self._is_running = False
        for member in self.registry:
            if isinstance(member.handle, LocalActor):
                end(member.handle)
