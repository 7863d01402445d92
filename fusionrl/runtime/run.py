"""A run from start to end: actors, checkpoint, loop, and the rescue of trained steps after an error."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fusionrl.config.config import Config
from fusionrl.observe.curves import draw_curves
from fusionrl.observe.metrics import MetricsSink, read_metrics
from fusionrl.observe.progress import Progress
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.runtime.checkpoints import Checkpoints
from fusionrl.runtime.early_start import EarlyStart
from fusionrl.runtime.loops import choose_loop
from fusionrl.runtime.model_card import write_model_card
from fusionrl.runtime.ray_cluster import FAILURES, root_cause
from fusionrl.runtime.reporter import Reporter
from fusionrl.runtime.resume_checks import find_checkpoint
from fusionrl.runtime.run_actors import Actors
from fusionrl.runtime.run_context import Run
from fusionrl.runtime.saver import Saver, load_checkpoint
from fusionrl.runtime.supervisor import StopSignal, Terminated

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
