"""A run from start to end: actors, checkpoints, loop, and the rescue of trained steps after an error."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from fusionrl.config.config import Config
from fusionrl.observe.curves import draw_curves
from fusionrl.observe.metrics import MetricsSink, read_metrics
from fusionrl.observe.progress import Progress
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.runtime.checkpoints import Checkpoint, Checkpoints, find_checkpoint
from fusionrl.runtime.early_start import EarlyStart
from fusionrl.runtime.loops import choose_loop
from fusionrl.runtime.model_card import write_model_card
from fusionrl.runtime.reporter import Reporter
from fusionrl.runtime.run_actors import Actors
from fusionrl.runtime.run_context import Run
from fusionrl.runtime.supervisor import FAILURES, StopSignal, Terminated, gather, root_cause

logger = logging.getLogger(__name__)
_TIMEOUT_S = 60.0  # for every trainer to finish its current call


def run_training(
    config: Config, plan: Plan, path: Path, attempt: int, progress: Progress, early_start: EarlyStart | None = None
) -> None:
    """Start everything, run the loop, end everything. SIGTERM ends it after a checkpoint, as does an error that leaves
    the trainers consistent. `early_start` holds what was started before. Raises Terminated after SIGTERM, when the
    checkpoint is written and every process has ended."""
    checkpoints = Checkpoints(path / "checkpoints")
    latest = find_checkpoint(config, checkpoints)
    loop = choose_loop(config)
    with (
        ThreadPoolExecutor(1) as drawing_thread,
        StopSignal() as stop,
        Actors(config, plan, path, attempt, say=progress.status, stop=stop, early_start=early_start) as actors,
        MetricsSink(path, attempt, config.run.use_tensorboard) as metrics,
    ):
        last = -1
        if config.run.resume and latest is None:
            progress.print(f"--resume: {checkpoints.folder} has no finished checkpoint; the run starts at step 0")
        if latest is not None:
            last = latest.rollout_id
            progress.print(f"resuming from {latest.path}, after step {last + 1} of {max(1, plan.num_rollout)}")
            with phase("restore", step=last + 1):
                load_checkpoint(config, actors, latest)
        is_fp32 = plan.precision == plan.rollout_dtype == "fp32"
        reporter = Reporter(config, path, metrics, progress, is_fp32)
        saver = Saver(config, plan, actors, checkpoints, last, reporter.status)
        run = Run(config, plan, path, actors, reporter, saver, stop, last + 1, last)
        try:
            loop(run)
            saver.finish()
            if config.checkpoint.save_hf is not None and actors.trainers:
                progress.status("saving the Hugging Face folder")
                with phase("save hf"):
                    actors.trainers.save_hf(Path(config.checkpoint.save_hf.format(rollout_id=plan.num_rollout - 1)))
        except Terminated:
            run.end_early()
            raise
        except BaseException as error:
            if isinstance(error, Exception) or actors.is_stalled(error):  # Ctrl-C saves nothing
                rescue(run)
            raise
        has_exported = config.checkpoint.save_hf is not None and bool(actors.trainers)
        title = f"{path.resolve().name} ({config.run.mode})"
        drawing = drawing_thread.submit(draw_curves, read_metrics(path), path / "curves.png", title)  # while actors end
    drawing.result()
    if has_exported:
        exported = Path(str(config.checkpoint.save_hf).format(rollout_id=plan.num_rollout - 1))
        write_model_card(exported, config, plan, read_metrics(path), path / "curves.png")


def rescue(run: Run) -> None:
    """Record and save the trained steps. Raises nothing: the error that ended the run must stay visible.

    A step whose training was finished counts, although the error kept it from its end.
    """
    try:
        if run.unrecorded is not None:
            run.reporter.record(*run.unrecorded)
    except Exception as error:  # of a full disk, or the one that ended the run: a metric that is a list
        logger.warning("the metrics of step %d could not be written: %s", run.last_trained + 1, error)
    if not run.saver.is_behind(run.last_trained):
        return
    try:
        run.reporter.print(f"the run failed; saving the trained steps (up to {run.last_trained + 1}) before it ends")
        _check_trainers(run)
        with suppress(*FAILURES):  # a dead engine has no memory to give
            run.make_room_for_trainers()
        run.end_early()
    except (Exception, KeyboardInterrupt) as error:  # any failure here would hide the first one
        reason = root_cause(error)
        logger.warning("the trained steps could not be saved: %s", str(reason) or type(reason).__name__)


def _check_trainers(run: Run) -> None:
    """Raise if a rank is dead, waits for another rank, or has learned a part of the next rollout."""
    try:
        ranks = run.actors.trainers.last_trained(_TIMEOUT_S)
    except TimeoutError:
        raise TimeoutError("the trainers wait for each other") from None
    if any(rollout_id is None or rollout_id > run.last_trained for rollout_id in ranks):
        raise RuntimeError(f"the error interrupted the training of step {run.last_trained + 2}")


class StateHashes(TypedDict):
    """SHA-256 of what a checkpoint restores; of each trainer a hash for each of its states."""

    buffer: str
    trainers: list[dict[str, str]]


@dataclass
class _Pending:
    rollout_id: int
    folder: Path
    facts: dict[str, object]


class Saver:
    """Checkpoints of the trainers and of the data cursor."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        actors: Actors,
        checkpoints: Checkpoints,
        last_saved: int,
        say: Callable[[str], None],
    ) -> None:
        """`last_saved`: rollout of the checkpoint that the run resumes from; -1: none."""
        self._config, self._plan, self._actors = config, plan, actors
        self._checkpoints, self._newest, self._say = checkpoints, last_saved, say  # one that failed is not tried again
        self._pending: _Pending | None = None

    def save_if_due(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Every --save-interval steps, and after the last one. What --async-save began is published when written."""
        interval = self._config.checkpoint.save_interval
        is_last = rollout_id + 1 == self._plan.num_rollout
        self.finish(wait=False)
        if is_last or (interval is not None and (rollout_id + 1) % interval == 0):
            self.save(rollout_id, metrics)

    def save(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Publish a checkpoint that contains the training of `rollout_id`; with --async-save, begin to.

        metrics: of that step, for the manifest.
        """
        options, trainers = self._config.checkpoint, self._actors.trainers
        if not self._is_new(rollout_id):
            return
        self.finish()
        self._newest = rollout_id
        self._say("saving a checkpoint")
        facts: dict[str, object] = {"mode": self._config.run.mode, "world_size": len(trainers), "metrics": metrics}
        with phase("save", step=rollout_id + 1):
            if options.verify_checkpoints:
                facts["hashes"] = state_hashes(self._actors, rollout_id)
            start = time.perf_counter()
            folder = self._checkpoints.begin(rollout_id)
            with self._checkpoints.discarding(folder):
                # When this returns, training may continue; the files are complete after `finish_save`.
                gather([self._actors.buffer.save(folder, rollout_id), *trainers.begin_save(folder, rollout_id)])
        self._pending = _Pending(rollout_id, folder, facts | {"seconds_stopped": time.perf_counter() - start})
        if not options.async_save:
            self.finish()

    def is_behind(self, rollout_id: int) -> bool:
        """Return whether `rollout_id` is to be saved, or the checkpoint that is being written to be published."""
        return self._is_new(rollout_id) or self._pending is not None

    def _is_new(self, rollout_id: int) -> bool:
        return not self._config.checkpoint.no_save and rollout_id >= 0 and rollout_id != self._newest

    def finish(self, wait: bool = True) -> None:
        """Publish the checkpoint that is being written, if any; without `wait` only if its files are there."""
        if self._pending is None or not (wait or self._actors.trainers.is_saved()):
            return
        pending, options = self._pending, self._config.checkpoint
        self._pending = None
        with phase("publish checkpoint", step=pending.rollout_id + 1), self._checkpoints.discarding(pending.folder):
            self._actors.trainers.finish_save()
            self._checkpoints.publish(pending.rollout_id, pending.folder, pending.facts)
        if options.keep_checkpoints is not None:
            with phase("publish checkpoint", step=pending.rollout_id + 1):
                self._checkpoints.prune(options.keep_checkpoints, options.keep_best)


def state_hashes(actors: Actors, rollout_id: int | None = None) -> StateHashes:
    """SHA-256 of the Buffer's state, of now or right after a rollout, and of each trainer's weights, optimizer and RNG
    states."""
    return {"buffer": actors.buffer.state_hash(rollout_id), "trainers": actors.trainers.state_hashes()}


def load_checkpoint(config: Config, actors: Actors, checkpoint: Checkpoint) -> None:
    """Restore the data cursor and the trainers. Raises ValueError if it does not fit this run; with
    --verify-checkpoints also if what was loaded is not what was saved."""
    path = checkpoint.path
    _, *restored = gather([actors.buffer.load(path), *actors.trainers.load(path)])
    if config.checkpoint.verify_checkpoints:
        same_layout = all(facts["rng_restored"] for facts in restored)
        loaded: StateHashes = {
            "buffer": actors.buffer.state_hash(),
            "trainers": [facts["hashes"] for facts in restored],
        }
        compare_hashes(checkpoint, loaded, same_layout=same_layout)


def compare_hashes(checkpoint: Checkpoint, loaded: StateHashes, *, same_layout: bool) -> None:
    """Raise where what was loaded is not, bit by bit, what was saved; ranks of another layout have other parts."""
    saved = checkpoint.manifest.get("hashes")
    if saved is None:
        return
    if not isinstance(saved, dict):
        raise ValueError(f"--verify-checkpoints: the hashes in the manifest of {checkpoint.path} are not a JSON object")
    wrong = ["the data cursor"] if saved["buffer"] != loaded["buffer"] else []
    if same_layout:
        for rank, (before, after) in enumerate(zip(saved["trainers"], loaded["trainers"], strict=True)):
            wrong += [f"{name} of trainer {rank}" for name in before if before[name] != after[name]]
    if wrong:
        raise ValueError(
            f"--verify-checkpoints: {checkpoint.path} was loaded, but {', '.join(wrong)} is not what was saved; "
            "its files have changed: delete that folder and resume from the one before it"
        )
