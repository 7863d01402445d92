"""The newest metrics of a run for Prometheus, served over HTTP by a separate process; needs no package.

    fusionrl_metric{run="sums", name="train/loss"} 0.02
    fusionrl_step{run="sums"} 17
    fusionrl_step_time_seconds{run="sums"} 1760000009.456

One family with the metric's own name as a label: metric names are not valid in Prometheus, and translated ones could
fall together.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fusionrl.observe.local_server import THIS_MACHINE, names_this_machine
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
        self._is_local = host in THIS_MACHINE
        self._values: dict[str, float] = {}
        self._step, self._time_s = 0, 0.0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer((host, int(port)), self._handler())
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def log(self, line: Line) -> None:
        """Take the values of a line."""
        with self._lock:
            self._values |= line.values
            self._step, self._time_s = line.step, line.time_s

    def text(self) -> str:
        """Return the values in Prometheus' text format."""
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
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            server_version = "fusionrl"

            def do_GET(self) -> None:
                is_ours = not metrics._is_local or names_this_machine(self.headers.get("Host"))
                is_known = is_ours and self.path == "/metrics"
                body = metrics.text().encode() if is_known else b"the metrics are at http://127.0.0.1:PORT/metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing: Prometheus asks every few seconds."""

        return Handler


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
