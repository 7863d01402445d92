"""`EnginePart`: the ranks of an engine on one of its other nodes. They compute; part 0 serves and is asked.

SGLang starts one server a node. All but the first answer nothing but whether their ranks are there.
"""

from __future__ import annotations

from fusionrl.engines.engine import EngineActor
from fusionrl.engines.process import ChildProcess, shared_memory_of, start_on_free_ports


class EnginePart(EngineActor):
    """Starts, watches and ends the server of one part; `start` of `EngineActor` is not for it."""

    def join(self, meeting: str, bootstrap_port: int | None = None) -> None:
        """Start the server, whose ranks meet the others at `meeting` (host:port), and wait until the engine is whole.

        bootstrap_port  of part 0, where the engine prefills

        Raises:
            RuntimeError: it ended, or the others did not come in time; with the end of the log.
        """

        def spawn(ports: list[int]) -> ChildProcess:
            # Part 0 decides where the ranks meet; the second port is none that SGLang takes then.
            self._server = self._spawn_server(
                ports[0], ports[0], meeting, bootstrap_port
            )  # so that a `shutdown` meanwhile ends it
            return self._server

        def wait_ready(server: ChildProcess) -> None:
            what = f"start of {self.spec.name} ({self.spec.model_path}) at {self.url}"
            server.wait_until(lambda: self._answers("/health"), self.spec.start_timeout_s, what)

        self.shutdown(0.0)  # of a try before this one
        self._server = start_on_free_ports(self.spec.host, 1, spawn, wait_ready)
        self._shared_memory |= {
            path for path in shared_memory_of(self._server.pid) if path.name.startswith(("sgl_", "sglang_"))
        }
