"""The newest metrics of a run for Prometheus, served over HTTP by a separate process; needs no package.

    fusionrl_metric{run="sums", name="train/loss"} 0.02
    fusionrl_step{run="sums"} 17
    fusionrl_step_time_seconds{run="sums"} 1760000009.456

One family with the metric's own name as a label: metric names are not valid in Prometheus, and translated ones could
fall together.
"""

from __future__ import annotations

import threading

from fusionrl.observe.local_server import Answer, make_server
from fusionrl.observe.track.adapters import Target
from fusionrl.observe.track.metric_lines import Line

DEFAULT_ADDRESS = "127.0.0.1:9464"
_HEAD = {
    "fusionrl_metric": "Newest value of a metric of the run; docs/reference/metrics.md describes each name.",
    "fusionrl_step": "Finished steps.",
    "fusionrl_step_time_seconds": "Time of the newest line, since 1970.",
}


class Prometheus:
    """Serves the newest value of each metric under /metrics until it is closed; a value that a step lacks stays."""

    def __init__(self, target: Target) -> None:
        host, _, port = (target.address or DEFAULT_ADDRESS).rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"--address {target.address}: expected HOST:PORT, such as {DEFAULT_ADDRESS}")
        self.run_id = target.run_id
        self._run = target.name
        self._values: dict[str, float] = {}
        self._step, self._time_s = 0, 0.0
        self._lock = threading.Lock()
        self._server = make_server(host, int(port), self._answer)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def log(self, line: Line) -> None:
        with self._lock:
            self._values |= line.values
            self._step, self._time_s = line.step, line.time_s

    def text(self) -> str:
        run = f'run="{_escape(self._run)}"'
        with self._lock:
            samples: dict[str, list[tuple[str, float]]] = {
                "fusionrl_metric": [(f'{run},name="{_escape(name)}"', value) for name, value in self._values.items()],
                "fusionrl_step": [(run, self._step)],
                "fusionrl_step_time_seconds": [(run, self._time_s)],
            }
        lines = []
        for family, about in _HEAD.items():
            lines += [f"# HELP {family} {about}", f"# TYPE {family} gauge"]
            lines += [f"{family}{{{labels}}} {value!r}" for labels, value in samples[family]]
        return "\n".join(lines) + "\n"

    def flush(self) -> bool:
        """Return True: a line is there as soon as it is taken."""
        return True

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, path: str) -> Answer:
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4", self.text().encode()
        return 404, "text/plain", b"the metrics are at http://127.0.0.1:PORT/metrics\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
