"""`fusionrl track`: every line arrives once, under its name and step; resumed runs go on; with the real packages."""

from __future__ import annotations

import importlib
import json
import math
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fusionrl import cli
from fusionrl.observe.metrics import Line, MetricsSink, read_lines
from fusionrl.observe.run_dir import RunDir
from fusionrl.observe.trackers import ADAPTERS, Target, mlflow_name
from tests.own_process import wait_until

Capsys, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

Points = list[tuple[str, int, float]]  # name, step, value; in the order in which they were sent


def track(capsys: Capsys, run: Path, *args: str, code: int = 0, to: str = "wandb") -> str:
    assert cli.main(["track", str(run), "--to", to, *args]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out.splitlines()[-1]


def memory(run: Path) -> dict[str, Any]:
    """What is remembered of the only tracker."""
    (entry,) = json.loads((run / "trackers.json").read_text()).values()
    return dict(entry)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of training, and an evaluation after the second."""
    folder = tmp_path / "sums"
    with RunDir(folder) as made:
        made.write_config({"run": {"seed": 3, "name": None}, "algorithm": {"kl_coef": 0.5}, "version": "0.1"})
    with MetricsSink(folder, 1) as sink:
        sink.log(1, {"train/loss": 0.5, "eval/a/pass@2": 0.25, "note": "text"})
        sink.log(2, {"train/loss": math.nan, "rollout/raw_reward": 1.0})
        sink.log(2, {"eval/a/pass@2": 0.75})
    return folder


FIRST = [("train/loss", 1, 0.5), ("eval/a/pass@2", 1, 0.25), ("rollout/raw_reward", 2, 1.0), ("eval/a/pass@2", 2, 0.75)]


def resume(run: Path) -> Points:
    """A second attempt that does step 2 again; returns what is new."""
    with MetricsSink(run, 2) as sink:
        sink.log(2, {"train/loss": 0.375, "perf/step_time_s": 0.5})
        sink.log(3, {"train/loss": 0.125})
    return [("train/loss", 2, 0.375), ("perf/step_time_s", 2, 0.5), ("train/loss", 3, 0.125)]


def test_lines_that_count(run: Path) -> None:
    lines = list(read_lines(run))
    values = [{"train/loss": 0.5, "eval/a/pass@2": 0.25}, {"rollout/raw_reward": 1.0}, {"eval/a/pass@2": 0.75}]
    assert [(line.step, line.values) for line in lines] == list(zip((1, 2, 2), values, strict=True))
    assert abs(lines[0].time_s - time.time()) < 60
    resume(run)
    assert [line.step for line in read_lines(run)] == [1, 2, 3], "step 2 of the first attempt counts no more"
    assert [line.step for line in read_lines(run, lines[-1].end)] == [2, 3]


def test_a_line_that_is_being_written_comes_later(run: Path) -> None:
    end = list(read_lines(run))[-1].end
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "attempt": 1, "time": 1.0, "a":')
        file.flush()
        assert list(read_lines(run, end)) == []
        file.write(" 2.0}\n[]\n")
    (line,) = read_lines(run, end)
    assert line.values == {"a": 2.0}


class Recorder:
    """A tracker of this test: what trackers do is seen below, this is about what they are given."""

    fail_at = 0
    is_queue = False  # what it was given arrives when it is closed
    close_fails = False
    num_closed = 0

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self.lines: list[Line] = []

    def __call__(self, target: Target) -> Recorder:
        self.targets.append(target)
        self.run_id = target.run_id
        return self

    def log(self, line: Line) -> None:
        if len(self.lines) + 1 == self.fail_at:
            raise ConnectionError("the server is gone")
        self.lines.append(line)

    def flush(self) -> bool:
        return not self.is_queue

    def close(self) -> None:
        self.num_closed += 1
        if self.close_fails:
            raise ConnectionError("nothing arrived at http://me:hush@host")


@pytest.fixture
def recorder(monkeypatch: Patch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(ADAPTERS, "wandb", made)
    return made


def test_a_tracker_gets_what_is_new(run: Path, recorder: Recorder, capsys: Capsys) -> None:
    assert track(capsys, run, "--project", "p") == f"{run}: 3 lines sent to wandb"
    (target,) = recorder.targets
    assert (target.project, target.name, target.is_new, target.offline) == ("p", "sums", True, False)
    assert target.config == {"seed": 3, "kl_coef": 0.5, "version": "0.1"}
    assert track(capsys, run, "--project", "p").endswith("0 lines sent to wandb")
    assert len(recorder.targets) == 1, "nothing is opened for nothing"
    resume(run)
    assert track(capsys, run, "--project", "p").endswith("2 lines sent to wandb")
    assert recorder.targets[1].run_id == target.run_id and not recorder.targets[1].is_new
    assert track(capsys, run, "--project", "q").endswith("3 lines sent to wandb"), "another project"
    track(capsys, run, "--project", "p", "--again")
    assert recorder.targets[3].run_id != target.run_id and recorder.targets[3].is_new


@pytest.mark.parametrize(("fail_at", "num_left"), [(1, 3), (2, 2)])
def test_after_a_failure_it_gets_the_rest(
    fail_at: int, num_left: int, run: Path, recorder: Recorder, capsys: Capsys
) -> None:
    """In the same run there, also where the first line failed."""
    recorder.fail_at = fail_at
    assert "the server is gone" in track(capsys, run, code=1)
    assert recorder.num_closed == 1, "also after an error"
    recorder.fail_at = 0
    assert track(capsys, run).endswith(f"{num_left} lines sent to wandb")
    first, second = recorder.targets
    assert [line.step for line in recorder.lines] == [1, 2, 2] and first.run_id == second.run_id
    assert first.is_new and not second.is_new


def test_what_has_not_arrived_is_sent_again(run: Path, recorder: Recorder, capsys: Capsys) -> None:
    """A tracker that only takes lines into a queue fails while it is closed."""
    recorder.is_queue = recorder.close_fails = True
    message = track(capsys, run, code=1)
    assert "nothing arrived" in message and "hush" not in message
    recorder.close_fails = False
    assert [track(capsys, run).split(": ")[1][0] for _ in range(2)] == ["3", "0"]
    first, second = recorder.targets
    assert second.run_id == first.run_id and not second.is_new, "the run there is the one that was opened"


def test_passwords_are_not_remembered(run: Path, recorder: Recorder, capsys: Capsys) -> None:
    address = "postgresql://me:hush@host/db"
    state = {f"wandb fusionrl {address}": {"run_id": "abc", "bytes": 0}}  # of an earlier version
    (run / "trackers.json").write_text(json.dumps(state))
    track(capsys, run, "--address", address)
    text = (run / "trackers.json").read_text()
    assert "hush" not in text and "me:***@host" in text and memory(run)["run_id"] == "abc"
    assert recorder.targets[0].address == address


_FOLLOWER = """
import sys
from fusionrl import cli
from fusionrl.observe.trackers import ADAPTERS
class Recorder:
    def __init__(self, target): self.run_id = target.run_id
    def log(self, line): print("line", flush=True)
    def flush(self): print("asked", flush=True)
    def close(self): print("closed", flush=True)
ADAPTERS["wandb"] = Recorder
sys.exit(cli.main(["track", sys.argv[1], "--to", "wandb", "--follow"]))
"""


def test_a_follower_that_is_terminated_keeps_what_was_sent(run: Path, capsys: Capsys) -> None:
    args = [sys.executable, "-c", _FOLLOWER, str(run)]
    with RunDir(run, resume=True), subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert [follower.stdout.readline() for _ in range(4)] == ["line\n"] * 3 + ["asked\n"]
            assert "another fusionrl track" in track(capsys, run, code=2)
            assert memory(run)["bytes"] == 0, "its run there is known, and nothing has arrived yet"
            follower.terminate()
            rest, _ = follower.communicate(timeout=20)
        finally:
            follower.kill()
    assert rest.startswith("asked\nclosed\n") and follower.returncode == 0
    assert memory(run)["bytes"] == list(read_lines(run))[-1].end


def test_another_machines_lock_is_named(run: Path, recorder: Recorder, monkeypatch: Patch, capsys: Capsys) -> None:
    (run / "run.lock").write_text(json.dumps({"pid": 1, "started": "x", "host": "elsewhere"}))

    monkeypatch.setattr("fusionrl.observe.track.time.sleep", Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["track", str(run), "--to", "wandb", "--follow"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("held by host elsewhere") == 1 and "3 lines sent" in captured.out


def test_following_to_the_end(run: Path, recorder: Recorder, capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.setattr("fusionrl.observe.track._POLL_S", 0.01)
    monkeypatch.setattr("fusionrl.observe.track.until_stopped", nullcontext)  # for the main thread
    held = RunDir(run, resume=True)
    followed = threading.Thread(target=cli.main, args=(["track", str(run), "--to", "wandb", "--follow"],))
    followed.start()
    wait_until(lambda: len(recorder.lines) >= 3)
    assert followed.is_alive(), "the run goes on"
    resume(run)
    held.close()
    followed.join(20)
    assert not followed.is_alive() and [line.step for line in recorder.lines] == [1, 2, 2, 2, 3]


def test_a_memory_that_was_changed_names_no_file(run: Path, recorder: Recorder, capsys: Capsys) -> None:
    for content in ('{"wandb fusionrl": {"run_id": "../../x", "bytes": 0}}', "[1]", "{", '{"wandb fusionrl": 3}'):
        (run / "trackers.json").write_text(content)
        track(capsys, run)
        assert recorder.targets[-1].is_new and recorder.targets[-1].run_id.isalnum()


def test_mistakes(run: Path, tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    for kind in ("mlflow", "trackio"):
        said = track(capsys, run, "--offline", "--address", "http://me:hush@host", code=2, to=kind)
        assert "leave one of the two out" in said and "hush" not in said
    (tmp_path / "empty").mkdir()
    assert "has no metrics.jsonl" in track(capsys, tmp_path / "empty", code=2)
    monkeypatch.setitem(sys.modules, "swanlab", None)
    assert "swanlab into an environment of its own" in track(capsys, run, code=2, to="swanlab")
    assert not (run / "trackers.json").exists()


def of_tensorboard(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted((run / "tensorboard" / "track").iterdir())
    events = [event for file in files for event in EventFileLoader(str(file)).Load()]
    return [
        (value.tag, event.step, value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value)
        for event in events
        for value in event.summary.value
    ]


def of_mlflow(run: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run / "mlruns").resolve().as_uri())
    experiment = client.get_experiment_by_name("fusionrl")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "sums" and found.data.params["kl_coef"] == "0.5" and found.info.status == "FINISHED"
    points = [one for name in found.data.metrics for one in client.get_metric_history(found.info.run_id, name)]
    return [(one.key.replace("_at_", "@"), one.step, one.value) for one in points]


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, blocks of 32 KiB with records that may go over their borders."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def records(files: Iterable[Path], kind: Any) -> Iterator[Any]:
    """The messages of a kind in files of that format, the oldest first."""
    for file in sorted(files, key=lambda path: path.stat().st_mtime):
        for text in log_records(file.read_bytes()):
            record = kind()
            record.ParseFromString(text)
            yield record


def of_wandb(run: Path) -> Points:
    from wandb.proto.wandb_internal_pb2 import Record

    points: Points = []
    names = set()
    for record in records((run / "wandb").glob("offline-run-*/*.wandb"), Record):
        if record.WhichOneof("record_type") == "run":
            names.add((record.run.run_id, record.run.project, record.run.display_name))
        values = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
        step = values.pop("step", None)
        own = {name: value for name, value in values.items() if name[0] != "_" and name != "time"}
        points += [(name, json.loads(step or ""), json.loads(value)) for name, value in own.items()]
    assert len(names) == 1 and names.pop()[1:] == ("fusionrl", "sums"), "the resumed run is the same one"
    return points


def of_swanlab(run: Path) -> Points:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found = [one.scalar for one in records((run / "swanlog").glob("run-*/*.swanlab"), Record) if one.HasField("scalar")]
    return [(scalar.key, scalar.step, scalar.value.number) for scalar in found]


def of_trackio(run: Path) -> Points:
    with sqlite3.connect(run / "trackio" / "fusionrl.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({name for name, _, _ in rows}) == 1, "the resumed run is the same one"
    return [(name, step, value) for _, step, text in rows for name, value in json.loads(text).items()]


def test_a_run_that_is_sent_again_does_not_double_tensorboard(run: Path, capsys: Capsys) -> None:
    pytest.importorskip("tensorboard.summary.writer.event_file_writer", reason="tensorboard is not installed here")
    for args in ([], ["--again"], []):
        track(capsys, run, *args, to="tensorboard")
    assert sorted(path.name for path in (run / "tensorboard").iterdir()) == ["track", "track-2"]
    assert sorted(of_tensorboard(run)) == sorted(FIRST)
    resume(run)
    track(capsys, run, to="tensorboard")
    assert sorted(of_tensorboard(run)) == sorted(FIRST), "what is new goes to the newest run"


def test_names_that_mlflow_takes() -> None:
    names = ["train/loss", "eval/a/pass@4", "my,metric(x)=%", "/a//b/../c", "..", "", "x" * 400, "größe: ä b-c.d_e"]
    plain = [mlflow_name(name) for name in names]
    assert plain[:6] == ["train/loss", "eval/a/pass_at_4", "my_metric_x___", "a/c", "_", "_"]
    assert len(plain[6]) == 250 and plain[7] == names[7]
    validation = pytest.importorskip("mlflow.utils.validation", reason="mlflow is not installed here")
    for name in plain:
        validation._validate_metric_name(name)


READERS: dict[str, tuple[str, Callable[[Path], Points]]] = {
    "tensorboard": ("tensorboard.summary.writer.event_file_writer", of_tensorboard),
    "mlflow": ("mlflow.tracking", of_mlflow),
    "wandb": ("wandb", of_wandb),
    "swanlab": ("swanlab", of_swanlab),
    "trackio": ("trackio", of_trackio),
}


@pytest.mark.parametrize("kind", READERS)
def test_what_arrives_in_a_real_tracker(kind: str, run: Path, monkeypatch: Patch) -> None:
    """Offline: the run's numbers as the tracker's own files have them, after a first command and after a resume."""
    package, read = READERS[kind]
    try:
        importlib.import_module(package)
    except ImportError as error:
        pytest.skip(f"{kind} is not installed here: {error}")
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "SWANLAB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the reader below; the command sets it by itself
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    def send() -> None:
        """In a process of its own, as a user does: these packages keep much for the life of a process."""
        command = [sys.executable, "-m", "fusionrl.cli", "track", str(run), "--to", kind, "--offline"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    send()
    assert sorted(read(run)) == sorted(FIRST)
    new = resume(run)
    send()
    assert sorted(read(run)) == sorted([*FIRST, *new]), "nothing is sent twice"
