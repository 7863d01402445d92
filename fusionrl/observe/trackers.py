"""One class for each tracker; its package is imported where it is opened.

Each opens or continues a run of the tracker and takes lines in order. `run_id` is the run's name there, to go
on with it later. Metrics keep their names and steps, and their times where the tracker takes one.
"""

import os
import posixpath
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionrl.base.wording import install_hint
from fusionrl.observe.metrics import Line

if TYPE_CHECKING:
    from fusionrl.observe.view.page import Answer


@dataclass(frozen=True)
class Target:
    """The run as a tracker opens it."""

    folder: Path  # the run's
    project: str
    name: str
    run_id: str  # see `track.SentPart`
    is_new: bool  # the tracker does not have the run yet
    config: Mapping[str, object]
    offline: bool = False  # nothing leaves this machine
    address: str = ""  # of the tracker's server, or of its files; "": the tracker's own choice


class Tracker:
    """An open run of a tracker. This class takes lines into a queue: only its end tells whether they have arrived."""

    run_id: str
    _session: Any  # what has `log` and `finish`

    def log(self, line: Line) -> None:
        """Send a line, or keep it to send it soon."""
        self._session.log(line.values, step=line.step)

    def flush(self) -> bool:
        """Return whether all lines so far have arrived; False where only `close` can tell."""
        return False

    def close(self) -> None:
        """Wait until everything has arrived."""
        self._session.finish()


class Wandb(Tracker):
    """Weights & Biases. Steps are a metric of their own: W&B's must grow, and a resumed run does steps again."""

    def __init__(self, target: Target) -> None:
        import wandb

        settings = wandb.Settings(console="off", base_url=target.address) if target.address else {"console": "off"}
        self.run_id = target.run_id
        self._session = wandb.init(
            project=target.project,
            name=target.name,
            id=target.run_id,
            resume="allow",
            mode="offline" if target.offline else "online",
            dir=str(target.folder),
            config=dict(target.config),
            settings=settings,
        )
        self._session.define_metric("step")
        self._session.define_metric("*", step_metric="step")

    def log(self, line: Line) -> None:
        self._session.log({**line.values, "step": line.step, "time": line.time_s})


class TensorBoard(Tracker):
    """TensorBoard's event files, in `tensorboard/track` of the run's folder or at the address.

    A new run goes into a folder that has none yet: `track`, `track-2`, …; its number is the run's name.
    """

    def __init__(self, target: Target) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        base = target.address or str(target.folder / "tensorboard" / "track")
        number = int(target.run_id[6:]) if re.fullmatch(r"track-\d+", target.run_id) else 1
        while target.is_new and any(Path(_numbered(base, number)).glob("events.out.tfevents.*")):
            number += 1
        self.run_id = f"track-{number}"
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(_numbered(base, number))

    def log(self, line: Line) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in line.values.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=line.time_s, step=line.step, summary=summary))

    def flush(self) -> bool:
        self._writer.flush()
        return True

    def close(self) -> None:
        self._writer.close()


def _numbered(base: str, number: int) -> str:
    return base if number == 1 else f"{base.rstrip('/')}-{number}"


class MLflow(Tracker):
    """MLflow, at the address, at MLFLOW_TRACKING_URI, or offline in `mlruns` of the run's folder."""

    def __init__(self, target: Target) -> None:
        local = target.offline and not target.address
        if local:
            # The store of plain files, which needs no database, is on its way out of MLflow; this variable keeps it.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient((target.folder / "mlruns").resolve().as_uri() if local else target.address or None)
        self.run_id = target.run_id
        if target.is_new:
            known = self._client.get_experiment_by_name(target.project)
            number = self._client.create_experiment(target.project) if known is None else known.experiment_id
            self.run_id = self._client.create_run(number, run_name=target.name).info.run_id
            params = [Param(name, str(value)[:500]) for name, value in target.config.items()]
            for start in range(0, len(params), 100):
                self._client.log_batch(self.run_id, params=params[start : start + 100])

    def log(self, line: Line) -> None:
        values = {mlflow_name(name): value for name, value in line.values.items()}
        metrics = [self._metric(name, value, round(line.time_s * 1000), line.step) for name, value in values.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


def mlflow_name(name: str) -> str:
    """Return a metric's name as MLflow takes it: without @ (`pass_at_4`) and other signs, and a plain path."""
    plain = re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"))
    return posixpath.normpath(plain).lstrip("./")[:250].rstrip("./") or "_"


class SwanLab(Tracker):
    """SwanLab; offline in `swanlog` of the run's folder, where each command makes a run of its own."""

    def __init__(self, target: Target) -> None:
        import swanlab

        self.run_id = target.run_id
        more = {} if target.offline else {"id": target.run_id, "resume": "allow"}
        swanlab.init(
            project=target.project,
            name=target.name,
            mode="offline" if target.offline else "online",
            log_dir=target.address or str(target.folder / "swanlog"),
            config=dict(target.config),
            **more,
        )
        self._session = swanlab


class Trackio(Tracker):
    """trackio: a database on this machine (TRACKIO_DIR; offline `trackio` of the run's folder), or a Space."""

    def __init__(self, target: Target) -> None:
        if target.offline:
            os.environ.setdefault("TRACKIO_DIR", str((target.folder / "trackio").resolve()))
        import trackio

        self._session = trackio
        self.run_id = target.run_id
        trackio.init(
            project=target.project,
            name=f"{target.name}-{target.run_id}",  # by which it continues a run
            space_id=target.address or None,
            config=dict(target.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


DEFAULT_ADDRESS = "127.0.0.1:9464"
_HEAD = {
    "fusionrl_metric": "Newest value of a metric of the run; docs/reference/metrics.md describes each name.",
    "fusionrl_step": "Finished steps.",
    "fusionrl_step_time_seconds": "Time of the newest line, since 1970.",
}


class Prometheus(Tracker):
    """Serves the newest value of each metric under /metrics until it is closed; a value that a step lacks stays.

        fusionrl_metric{run="sums", name="train/loss"} 0.02
        fusionrl_step{run="sums"} 17
        fusionrl_step_time_seconds{run="sums"} 1760000009.456

    The metric's own name is a label: metric names are not valid in Prometheus, and translated ones could fall together.
    """

    def __init__(self, target: Target) -> None:
        from fusionrl.observe.view.page import make_server  # with numpy: only where it is needed

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
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

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
        return True  # a line is there as soon as it is taken

    def close(self) -> None:
        self._server.shutdown()  # returns when `serve_forever` has
        self._server.server_close()

    def _answer(self, path: str) -> "Answer":
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4", self.text().encode()
        return 404, "text/plain", b"the metrics are at http://127.0.0.1:PORT/metrics\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


ADAPTERS: dict[str, Callable[[Target], Tracker]] = {
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "swanlab": SwanLab,
    "trackio": Trackio,
    "prometheus": Prometheus,
}


def open_tracker(kind: str, target: Target) -> Tracker:
    """Open a run of a tracker, by its name in `ADAPTERS`; ValueError if its package is missing, or it refuses."""
    try:
        return ADAPTERS[kind](target)
    except ImportError as error:
        cure = f"{install_hint(kind)} (docs/guides/inspect.md)"
        raise ValueError(f"--to {kind}: its package cannot be imported ({error}); {cure}") from error
    except ValueError:
        raise
    except Exception as error:  # each tracker has errors of its own: no key, no server, no such project
        raise ValueError(f"--to {kind} cannot be opened: {type(error).__name__}: {error}") from error


def flat_config(config: Mapping[str, Any]) -> dict[str, object]:
    """A run's flags by name, without their groups and without those that are not set."""
    groups = [value if isinstance(value, dict) else {group: value} for group, value in config.items()]
    return {str(name): value for group in groups for name, value in group.items() if value is not None}
