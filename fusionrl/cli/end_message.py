"""The message of a run that ended before its last step: the saved steps, and the command that resumes it."""

import shlex
from pathlib import Path

from fusionrl.config.config import Config
from fusionrl.config.run_parts import changes_weights, saves
from fusionrl.observe.metrics import read_metrics
from fusionrl.runtime.checkpoints import Checkpoints


def saves_at_the_end_only(config: Config) -> bool:
    """Return whether a run that is killed before its end loses all of its steps."""
    options = config.checkpoint
    return saves(config) and changes_weights(config) and not options.no_save and not options.save_interval


def end_message(config: Config, path: Path, attempt: int, *, has_failed: bool = False) -> str:
    """Say after which step the run in `path` ended, what is lost, and how to resume it; "" if nothing is saved.

    Everything is read from the run's folder, so it holds however the run ended. For a run that `has_failed` before
    the end of its first step: "".
    """
    if not saves(config):
        return ""
    saved, name = _saved(path)
    finished = _finished(path, attempt, saved)
    if has_failed and not finished:
        return ""
    where = f" after step {finished}" if finished else " before the end of the first step"
    if config.checkpoint.no_save:
        return f"{where}; nothing is saved (--no-save)"
    command = f"fusionrl train --run-dir {shlex.quote(str(path))} --resume"
    on_from = name or "the start"
    if finished > saved:
        are_lost = f"steps {saved + 1}-{finished} are lost" if finished > saved + 1 else f"step {finished} is lost"
        more = "" if config.checkpoint.save_interval else " (--save-interval N saves every N steps)"
        text = f"; {are_lost}: --resume continues from {on_from}{more}"
    elif saved:
        text = f"; {name} has all of it: --resume continues from there"
    else:
        text = f"; nothing is {'trained' if changes_weights(config) else 'saved'} yet: --resume begins at step 1"
    return f"{where}{text}\nto continue: {command}"


def _saved(path: Path) -> tuple[int, str]:
    """The number of steps in the newest finished checkpoint, and its name; 0 and "" without one."""
    try:
        latest = Checkpoints(path / "checkpoints").latest()
    except (ValueError, OSError):  # damaged: a resume says so
        latest = None
    return (0, "") if latest is None else (latest.rollout_id + 1, latest.path.name)


def _finished(path: Path, attempt: int, saved: int) -> int:
    """Return the number of finished steps, with those of the checkpoint that this attempt resumed."""
    try:
        rows = read_metrics(path)
    except (ValueError, OSError):
        rows = []
    return max((row["step"] for row in rows if row["attempt"] == attempt), default=saved)
