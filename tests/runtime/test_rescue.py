"""After an error: the steps that are trained are recorded and saved, if the trainers are consistent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fusionrl.observe.metrics import STEP_TIME
from fusionrl.runtime import loops
from fusionrl.runtime.checkpoints import Checkpoints
from fusionrl.runtime.run import rescue
from fusionrl.runtime.run_context import Run
from fusionrl.runtime.saver import Saver
from fusionrl.runtime.supervisor import StopSignal
from fusionrl.weights.in_process import put
from tests.runtime.run_fakes import Cluster, Diary, run_of


class Disk:
    """Trainers and a Buffer that write a file each; `breaks` raises in their place."""

    def __init__(self, breaks: Callable[[], None] = lambda: None) -> None:
        self.breaks, self.num_saves, self.is_written = breaks, 0, True

    def __len__(self) -> int:
        return 1

    def save(self, folder: Path, rollout_id: int) -> Any:
        (folder / "buffer.json").write_text("{}")
        return put(None)

    def begin_save(self, folder: Path, rollout_id: int) -> list[Any]:
        self.num_saves += 1
        (folder / "trainer").mkdir()
        (folder / "trainer" / "weights").write_text(f"{rollout_id}")
        self.breaks()
        return [put(None)]

    def is_saved(self) -> bool:
        return self.is_written

    def finish_save(self) -> None: ...


def failing(path: Path, at: str, disk: Disk | None = None, **flags: Any) -> tuple[Run, Diary]:
    """A run in `path` with a real `Saver`, whose second call of the part `at` raises."""
    cluster = Cluster()
    run, diary = run_of(cluster, StopSignal(), 4, **flags)
    disk = disk or Disk()
    actors: Any = SimpleNamespace(buffer=disk, trainers=disk)
    run.saver = Saver(run.config, run.plan, actors, Checkpoints(path), -1, lambda text: None)
    cluster.error_at = at
    return run, diary


def rescued(run: Run, loop: loops.Loop = loops.on_policy) -> None:
    with pytest.raises(RuntimeError, match="failed"):
        loop(run)
    rescue(run)


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
    run.actors.trainers.last_trained = lambda timeout_s: [last - 1, -1]  # a policy whose critic alone has learned
    rescued(run, loops.MODES.get(mode, loops.on_policy))
    assert saved(tmp_path) == [f"step_{last:06d}"] and max(diary.rows) == last
    # By it readers know who did a step last: the numbers of an earlier attempt at this one do not count.
    assert all(STEP_TIME in diary.rows[step] for step in range(1, last + 1))


@pytest.mark.parametrize("ranks", [[None, 0], [1, 0]])
def test_a_part_of_a_step_is_not_saved(ranks: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, _ = failing(tmp_path, "train 1")
    run.actors.trainers.last_trained = lambda timeout_s: ranks
    rescued(run)
    assert saved(tmp_path) == []
    assert "could not be saved: the error interrupted the training of step 2" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (TimeoutError("60 s"), "the trainers wait for each other"),
    ],
)
def test_what_goes_wrong_in_the_rescue_is_told_and_hides_nothing(error, reason, tmp_path, caplog) -> None:
    fail = Mock(side_effect=error)
    run, _ = failing(tmp_path, "generate 1", Disk(fail))
    if isinstance(error, TimeoutError):
        run.actors.trainers.last_trained = fail
    rescued(run)
    assert f"the trained steps could not be saved: {reason}" in caplog.text
    assert not list(tmp_path.iterdir()), "nothing is left of it"


def test_a_row_that_cannot_be_written_costs_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, _ = failing(tmp_path, "never")
    error = ValueError("metric 'rollout/mine' failed: it is a list")
    run.reporter.record = Mock(side_effect=[None, error, error])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="it is a list"):
        loops.on_policy(run)
    rescue(run)
    assert saved(tmp_path) == ["step_000001"] and "metrics of step 1 could not be written" in caplog.text


def test_nothing_is_saved_that_was_not_asked_for(tmp_path: Path) -> None:
    disk = Disk()
    run, diary = failing(tmp_path, "push 2", disk, no_save=True)
    rescued(run)
    assert disk.num_saves == 0 and sorted(diary.rows) == [0, 1, 2], "the numbers are kept even so"
    run, _ = failing(tmp_path, "generate 0", disk)
    rescued(run)
    assert disk.num_saves == 0 and not saved(tmp_path), "no step is trained"


def test_a_save_that_failed_is_not_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a full disk it would fail again, after as long a time."""
    disk = Disk(Mock(side_effect=RuntimeError("the save failed: no space left on device")))
    run, _ = failing(tmp_path, "never", disk, save_interval=2)
    rescued(run)
    assert disk.num_saves == 1 and run.last_trained == 1 and "could not be saved" not in caplog.text


def test_what_async_save_was_writing_is_published(tmp_path: Path) -> None:
    disk = Disk()
    run, _ = failing(tmp_path, "generate 1", disk, async_save=True, save_interval=1)
    disk.is_written = False
    with pytest.raises(RuntimeError, match="failed"):
        loops.on_policy(run)
    assert saved(tmp_path) == []
    rescue(run)
    assert saved(tmp_path) == ["step_000001"] and disk.num_saves == 1
