"""Checkpoints: published whole or not at all, whatever happens while one is written."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from fusionrl.observe.metrics import STEP_TIME
from fusionrl.runtime import loops
from fusionrl.runtime.checkpoints import Checkpoint, Checkpoints, Saver
from fusionrl.runtime.run import Run
from fusionrl.runtime.supervisor import StopSignal
from fusionrl.weights.remote_calls import get, put
from tests.runtime.run_fakes import Cluster, Diary, run_of


def write(path: Path) -> None:
    (path / "weights").write_text("whole")


class Store(Checkpoints):
    """Checkpoints with what their driver does."""

    def publish_step(self, rollout_id: int, write: Callable[[Path], None] = write, **facts: Any) -> Checkpoint:
        folder = self.begin(rollout_id)
        with self.discarding(folder):
            write(folder)
            return self.publish(rollout_id, folder, facts)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def test_the_newest_one_is_found(store: Store) -> None:
    assert store.latest() is None
    for rollout_id in (0, 9, 1_999_999, 3):
        made = store.publish_step(rollout_id, mode="rl")
        assert (made.path / "weights").read_text() == "whole"
    latest = store.latest()
    assert latest is not None and (latest.rollout_id, latest.path.name) == (1_999_999, "step_2000000")
    manifest = json.loads((latest.path / "manifest.json").read_text())
    assert (manifest["mode"], manifest["rollout_id"]) == ("rl", 1_999_999)


def test_old_ones_are_deleted_but_the_best(store: Store) -> None:
    for rollout_id, accuracy in enumerate([0.1, 0.7, 0.7, None, "high", 0.2]):
        store.publish_step(rollout_id, metrics={} if accuracy is None else {"eval/held-out/accuracy": accuracy})
    (store.folder / "notes").mkdir()
    store.prune(2, "eval/held-out/accuracy")
    assert store.names() == ["notes", "step_000003", "step_000005", "step_000006"]
    store.prune(2)
    assert store.names() == ["notes", "step_000005", "step_000006"]
    assert store.prune(3) == []
    store.prune(1, "no/such/metric")
    assert store.names() == ["notes", "step_000006"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_one_before(store: Store, error: type[BaseException]) -> None:
    """Also that of the same step."""
    first = store.publish_step(0)

    def breaks(path: Path) -> None:
        write(path)
        raise error("the disk is full")

    for rollout_id in (1, 0):
        with pytest.raises(error):
            store.publish_step(rollout_id, breaks)
        assert store.latest() == first and store.names() == ["step_000001"]
    assert (first.path / "weights").read_text() == "whole"


def test_a_kill_in_the_middle_of_a_write_leaves_the_one_before(store: Store) -> None:
    first = store.publish_step(0)
    (store.begin(1) / "weights").write_text("half")
    assert store.latest() == first
    second = store.publish_step(2)  # what the killed one left is in nobody's way, and goes
    assert store.names() == ["step_000001", "step_000003"] and store.latest() == second


def test_folders_that_were_never_published_do_not_count(store: Store) -> None:
    first = store.publish_step(0)
    for name in ("step_000005", ".writing_step_000006", "step_last", "step_7"):
        (store.folder / name).mkdir()
        if name != "step_000005":
            (store.folder / name / "manifest.json").write_text('{"rollout_id": 99}')
    assert store.latest() == first


def test_saving_a_step_again_replaces_it(store: Store) -> None:
    store.publish_step(0)
    again = store.publish_step(0, lambda path: None, attempt=2)
    assert not (again.path / "weights").exists()
    assert json.loads((again.path / "manifest.json").read_text())["attempt"] == 2


def test_a_bad_older_one_and_a_copy_stop_neither_a_resume_nor_a_save(store: Store, caplog: Any) -> None:
    """A copy that is the newest is an error, which names the one before."""
    for rollout_id in range(4):
        store.publish_step(rollout_id)
    (store.folder / "step_000001" / "manifest.json").write_text('{"rollout_id": 0, "fi')
    latest = store.latest()
    assert latest is not None and latest.path.name == "step_000004"
    shutil.copytree(store.folder / "step_000002", store.folder / "step_000900")
    assert [path.name for path in store.prune(2)] == ["step_000002"]
    assert "step_000001" in caplog.text and "step_000900" in caplog.text
    assert store.names() == ["step_000001", "step_000003", "step_000004", "step_000900"]
    with pytest.raises(ValueError, match=r"(?s)step_000900.*does not belong.*resume from step_000004"):
        store.latest()


def test_subfolders_without_a_description_are_hashed_and_checked(store: Store) -> None:
    def write_folders(path: Path) -> None:
        write(path)
        for name in ("empty", "notes", "trainer"):
            (path / name).mkdir()
        (path / "notes" / "a").write_text("mine")
        (path / "trainer" / "fusionrl.json").write_text("{}")
        (path / "trainer" / "shard").write_text("hashed by the trainer")

    checkpoint = store.publish_step(0, write_folders)
    store.check(checkpoint)
    folders = checkpoint.manifest["folders"]
    assert {name: list(facts) for name, facts in folders.items()} == {"notes": ["a"], "trainer": ["fusionrl.json"]}
    (checkpoint.path / "notes" / "a").write_text("else")
    with pytest.raises(ValueError, match="in notes: a is not what was saved"):
        store.check(checkpoint)


def test_a_checkpoint_of_the_version_before_hashes_is_let_through(store: Store, caplog: Any) -> None:
    def write_trainer(path: Path) -> None:
        (path / "trainer").mkdir()
        (path / "trainer" / "fusionrl.json").write_text('{"format": 1}')
        (path / "buffer.json").write_text("{}")

    path = store.publish_step(0, write_trainer).path
    manifest = json.loads((path / "manifest.json").read_text())
    old = {name: value for name, value in manifest.items() if name not in ("format", "files", "folders")}

    def check_with(manifest: dict[str, Any]) -> None:
        (path / "manifest.json").write_text(json.dumps(manifest))
        latest = store.latest()
        assert latest is not None
        store.check(latest)

    check_with(old)
    assert len(caplog.records) == 1 and "without hashes" in caplog.text

    def assert_refused(manifest: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="lists no files with hashes"):
            check_with(manifest)

    assert_refused(old | {"format": manifest["format"]})  # the new format, its hashes taken out
    (path / "trainer" / "fusionrl.json").write_text('{"format": 2}')
    assert_refused(old)
    (path / "trainer" / "fusionrl.json").write_text('{"format": 1}')
    os.mkfifo(path / "pipe")
    assert_refused(old)


# ------------ after an error: the trained steps are recorded and saved, if the trainers are consistent
def disk_of(error: BaseException | None = None) -> MagicMock:
    """Trainers and a Buffer that write a file each; the trainers raise an error after it."""

    def save(path: str, rollout_id: int) -> Any:
        Path(path).write_text("{}")
        return put(None)

    def begin_save(folder: Path, rollout_id: int) -> list[Any]:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "weights").write_text(f"{rollout_id}")
        if error is not None:
            raise error
        return [put(None)]

    disk = MagicMock(**{"__len__.return_value": 1, "is_saved.return_value": [put(True)]})
    disk.finish_save.return_value = []
    disk.call = lambda method, *args: getattr(disk, method)(*args)
    disk.finished = []

    def finish(method: str, *args: object) -> list[Any]:
        disk.finished.append(method)
        return list(get(disk.call("begin_save" if method == "save" else method, *args)))

    disk.finish = finish
    disk.save.remote, disk.begin_save = save, Mock(side_effect=begin_save)
    return disk


def failing(path: Path, at: str, disk: MagicMock | None = None, **flags: Any) -> tuple[Run, Diary]:
    """A run in `path` with a real `Saver`, whose second call of the part `at` raises."""
    cluster = Cluster()
    run, diary = run_of(cluster, StopSignal(), 4, **flags)
    disk = disk or disk_of()
    buffer = SimpleNamespace(ask=lambda method, *args: getattr(disk, method).remote(*args), wait=get, num_replaced=0)
    actors: Any = SimpleNamespace(buffer=buffer, trainers=disk)
    run.saver = Saver(run.config, run.plan, actors, Checkpoints(path), -1, lambda text: None)
    cluster.error_at = at
    return run, diary


def rescued(run: Run, loop: loops.Loop = loops.on_policy) -> None:
    with pytest.raises(RuntimeError, match="failed"):
        loop(run)
    run.rescue()


def test_the_buffer_s_file_and_hash_are_of_one_buffer(tmp_path: Path) -> None:
    """One that replaces another has not the answers of its stream."""
    run, _ = failing(tmp_path, "", verify_checkpoints=True)
    buffer: Any = run.saver._actors.buffer
    writes = []

    def ask(method: str, path: str, rollout_id: int) -> Any:
        writes.append(buffer.num_replaced)
        Path(path).write_text("{}")
        return put(None)

    def call(method: str, rollout_id: int) -> str:
        buffer.num_replaced = 1  # the first time it dies in the call
        return f"{method} of Buffer {buffer.num_replaced}"

    buffer.ask, buffer.call = ask, call
    run.saver._actors.trainers.state_hashes.return_value = [put({"rank": 0})]
    run.saver.save(0, {})
    manifest = json.loads(next(tmp_path.glob("step_*/manifest.json")).read_text())
    assert writes == [0, 1] and manifest["hashes"]["buffer"] == "state_hash of Buffer 1"


def saved(path: Path) -> list[str]:
    return sorted(one.parent.name for one in path.glob("step_*/manifest.json"))


@pytest.mark.parametrize(
    ("mode", "at", "last"),
    [
        *(("rl", "generate 1", 1), ("rl", "push 2", 2), ("rl", "evaluate 2", 2)),
        *(("sft", "generate 1", 1), ("reject-sampling", "generate 1", 1)),  # accepted samples are kept as steps are
    ],
)
def test_the_trained_steps_are_recorded_and_saved(tmp_path: Path, mode: str, at: str, last: int) -> None:
    """Also the step in which the error came, where its training was finished: a resume begins after it."""
    run, diary = failing(tmp_path, at, mode=mode)
    run.actors.trainers.last_trained = lambda: [last - 1, -1]  # a policy whose critic alone has learned
    rescued(run, loops.MODES.get(mode, loops.on_policy))
    assert saved(tmp_path) == [f"step_{last:06d}"] and max(diary.rows) == last
    # By it readers know who did a step last: the numbers of an earlier attempt at this one do not count.
    assert all(STEP_TIME in diary.rows[step] for step in range(1, last + 1))


@pytest.mark.parametrize("ranks", [[None, 0], [1, 0]])
def test_a_part_of_a_step_is_not_saved(ranks: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, _ = failing(tmp_path, "train 1")
    run.actors.trainers.last_trained = lambda: ranks
    rescued(run)
    assert saved(tmp_path) == []
    assert "could not be saved: the error interrupted the training of step 2" in caplog.text


def test_older_weights_are_not_saved_as_the_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Trainers that did not come back may have those of a snapshot, or of the beginning."""
    run, _ = failing(tmp_path, "train 1")
    run.actors.trainers.last_trained = lambda: [-1, -1]
    run.actors.recovery.is_behind = True
    rescued(run)
    assert saved(tmp_path) == []
    assert "could not be saved: the trainers did not come back with the weights of step 1" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (TimeoutError("60 s"), "the trainers wait for each other"),
    ],
)
def test_what_goes_wrong_in_the_rescue_is_told_and_hides_nothing(error, reason, tmp_path, caplog) -> None:
    run, _ = failing(tmp_path, "generate 1", disk_of(error))
    if isinstance(error, TimeoutError):
        run.actors.trainers.last_trained = Mock(side_effect=error)
    rescued(run)
    assert f"the trained steps could not be saved: {reason}" in caplog.text
    assert not list(tmp_path.iterdir()), "nothing is left of it"


def test_a_row_that_cannot_be_written_costs_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, _ = failing(tmp_path, "never")
    error = ValueError("metric 'rollout/mine' failed: it is a list")
    run.reporter.record = Mock(side_effect=[None, error, error])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="it is a list"):
        loops.on_policy(run)
    run.rescue()
    assert saved(tmp_path) == ["step_000001"] and "metrics of step 1 could not be written" in caplog.text


def test_nothing_is_saved_that_was_not_asked_for(tmp_path: Path) -> None:
    disk = disk_of()
    run, diary = failing(tmp_path, "push 2", disk, no_save=True)
    rescued(run)
    assert disk.begin_save.call_count == 0 and sorted(diary.rows) == [0, 1, 2], "the numbers are kept even so"
    run, _ = failing(tmp_path, "generate 0", disk)
    rescued(run)
    assert disk.begin_save.call_count == 0 and not saved(tmp_path), "no step is trained"


def test_a_save_that_failed_is_not_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a full disk it would fail again, after as long a time."""
    disk = disk_of(RuntimeError("the save failed: no space left on device"))
    run, _ = failing(tmp_path, "never", disk, save_interval=2)
    rescued(run)
    assert disk.begin_save.call_count == 1 and run.last_trained == 1 and "could not be saved" not in caplog.text


def taking_turns(path: Path, at: str, **flags: Any) -> tuple[Run, Diary]:
    """The same run on shared GPUs: its log says, too, when engines give their memory back, or end, and trainers save.
    A save takes half a second."""
    disk = disk_of()
    run, diary = failing(path, at, disk, **flags)
    run.plan.engines_give_memory = True  # type: ignore[misc]
    engines: Any = run.actors.engines
    engines.release_memory = lambda: diary.log.append("engines give")
    engines.make_way = lambda: diary.log.append("engines end")
    begin_save = disk.begin_save.side_effect

    def save(folder: Path, rollout_id: int) -> list[Any]:
        diary.log.append(f"begin save {rollout_id}")
        time.sleep(0.5)
        return list(begin_save(folder, rollout_id))

    disk.begin_save = save
    return run, diary


def parts_of(diary: Diary) -> list[str]:
    names = ("engines", "begin", "push", "generate")
    return [line.removesuffix(" to all") for line in diary.log if line.startswith(names)]


def test_trainers_that_take_turns_save_before_the_engines_get_the_memory(tmp_path: Path) -> None:
    run, diary = taking_turns(tmp_path, "never", save_interval=2)
    loops.on_policy(run)
    assert parts_of(diary) == [
        "push 0",
        *("generate 0", "engines give", "push 1"),
        *("generate 1", "engines give", "begin save 1", "push 2"),
        *("generate 2", "engines give", "push 3"),
        *("generate 3", "engines give", "begin save 3", "push 4"),
    ]
    assert saved(tmp_path) == ["step_000002", "step_000004"]
    manifest = json.loads((tmp_path / "step_000002" / "manifest.json").read_text())
    assert manifest["metrics"] == diary.rows[2] and "eval/x/accuracy" in manifest["metrics"], "of the end of the step"
    trainers: Any = run.saver._actors.trainers
    assert trainers.finished == ["save", "save"], "complete before the memory goes"
    assert manifest["seconds_stopped"] >= 0.5 > diary.rows[2][STEP_TIME]


def test_an_error_after_such_a_save_publishes_it(tmp_path: Path) -> None:
    run, diary = taking_turns(tmp_path, "push 2", save_interval=2)
    run.actors.trainers.last_trained = lambda: [1]
    rescued(run)
    assert saved(tmp_path) == ["step_000002"] and diary.log.count("begin save 1") == 1


def test_trainers_that_take_turns_save_when_the_engines_have_ended(tmp_path: Path) -> None:
    """After an error, or a stop: requests may be under way, so engines cannot give their memory back."""
    run, diary = taking_turns(tmp_path, "generate 1")
    rescued(run)
    assert parts_of(diary)[-3:] == ["generate 1", "engines end", "begin save 0"] and saved(tmp_path) == ["step_000001"]


def test_what_async_save_was_writing_is_published(tmp_path: Path) -> None:
    disk = disk_of()
    run, _ = failing(tmp_path, "generate 1", disk, async_save=True, save_interval=1)
    disk.is_saved.return_value = [put(False)]
    with pytest.raises(RuntimeError, match="failed"):
        loops.on_policy(run)
    assert saved(tmp_path) == []
    run.rescue()
    assert saved(tmp_path) == ["step_000001"] and disk.begin_save.call_count == 1
    assert disk.finished == ["begin_save"], "it is written while training continues"
