"""A run from start to end: its actors, checkpoints and loop, and the rescue of trained steps after an error."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.base.cpu_wing import DEPENDS_ON_BATCH
from fusionrl.base.wording import headline
from fusionrl.buffer.schedule import outlasts_record
from fusionrl.config.config import Config
from fusionrl.config.run_parts import is_streamed
from fusionrl.observe.curves import draw_curves
from fusionrl.observe.formats import write_atomically
from fusionrl.observe.metrics import MetricsSink, read_metrics
from fusionrl.observe.progress import Progress
from fusionrl.observe.run_dir import exported_rollout, forget_export, note_export, read_states
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.plan.repeatable import repeatability
from fusionrl.runtime.checkpoints import Checkpoints, Saver, find_checkpoint, load_checkpoint
from fusionrl.runtime.early_start import EarlyStart
from fusionrl.runtime.loops import choose_loop
from fusionrl.runtime.model_card import write_model_card
from fusionrl.runtime.reporter import Reporter
from fusionrl.runtime.retention import Retention
from fusionrl.runtime.run_actors import Actors
from fusionrl.runtime.supervisor import StopSignal, Terminated, root_cause
from fusionrl.weights.remote_calls import gather, get

if TYPE_CHECKING:
    from fusionrl.runtime.background_eval import BackgroundEval

logger = logging.getLogger(__name__)
REPEATABLE = "repeatable.json"
_TIMEOUT_S = 60.0  # for every trainer to finish its current call


@dataclass
class Run:
    """A run that is set up: its actors, and where its numbers and checkpoints go. It holds references, no samples."""

    config: Config
    plan: Plan
    path: Path
    actors: Actors
    reporter: Reporter
    saver: Saver
    stop: StopSignal
    first_rollout: int  # 0, or the first after the checkpoint that the run resumes from
    last_trained: int  # the last rollout whose training is finished; -1: none yet
    unrecorded: tuple[int, dict[str, float]] | None = None  # a trained step whose row is not written yet
    background_eval: BackgroundEval | None = field(init=False, default=None)
    """Evaluations run during training, on engines of their own."""

    def __post_init__(self) -> None:
        self.retention = Retention(self.config, self.path)
        if self.plan.eval_bundles:
            from fusionrl.runtime.background_eval import BackgroundEval

            self.background_eval = BackgroundEval(self.actors.buffer, self.reporter, self._push_for_evaluation)

    def push(self, version: int, to_evaluation: bool = False) -> dict[str, float]:
        """As of `WeightSync`, again where trainers have failed in it and are back."""
        push = self.actors.weights.push
        return self.actors.recovery.retry(lambda: push(version, to_evaluation), of_engines=True)

    def prepare_round(self) -> None:
        """As of `WeightSync`; it may push."""
        self.actors.recovery.retry(self.actors.weights.prepare_round, of_engines=True)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate, and say the result. Engines of its own only begin it; it is recorded when it has ended."""
        if self.background_eval is not None:
            self.background_eval.begin(step, self.actors.weights.version)
            return {}
        self.reporter.status("evaluating")
        with phase("evaluate", step=step):
            self.prepare_round()
            version = None if self.plan.transport is None else self.actors.weights.version
            values = self.actors.buffer.wait_evaluation(self.actors.buffer.start_evaluation(step, version))
        self.reporter.show_evaluation(step, values)
        return values

    def validate(self, step: int) -> dict[str, float]:
        """Validation losses of --mode sft, and say them."""
        self.reporter.status("validating")
        with phase("validate", step=step):
            shards = self.actors.buffer.validation_shards()
            values = self.actors.recovery.retry(lambda: self.actors.trainers.validation_losses(shards))
        self.reporter.show_evaluation(step, values)
        return values

    @property
    def is_eval_first(self) -> bool:
        """Return whether there is an evaluation before the first step."""
        return self.config.eval.has_sets and not self.config.eval.skip_eval_before_train and self.first_rollout == 0

    def is_eval_due(self, step: int) -> bool:
        """Every --eval-interval steps, and after the last one."""
        interval = self.config.eval.eval_interval
        return interval is not None and (step % interval == 0 or step == self.plan.num_rollout)

    def is_eval_owed(self) -> bool:
        """Return whether the run resumes from a step whose background evaluation has no result.

        Warns of one that started at an earlier step, whose weights are gone.
        """
        if self.background_eval is None or not (self.first_rollout and self.config.eval.eval_interval):
            return False
        from fusionrl.runtime.background_eval import PastEvaluations

        past = PastEvaluations(self.path)
        lost = past.last_begun(before=self.first_rollout)
        if lost is not None and not past.has_result(lost):
            logger.warning("the evaluation after step %d had not ended when the run stopped; it has no result", lost)
        is_due = self.is_eval_due(self.first_rollout) or past.was_due(self.first_rollout)
        return is_due and not past.has_result(self.first_rollout)

    def _push_for_evaluation(self, step: int) -> int | None:
        """Push the weights after `step` again, also to engines that evaluate; None where trainers have newer ones."""
        weights = self.actors.weights
        if self.last_trained + 1 != step or weights.version != step:
            return None
        self.push(step, to_evaluation=True)
        return step

    def end_early(self) -> None:
        """After a stop: publish a checkpoint, and record the background evaluation if it has ended."""
        if self.saver.is_behind(self.last_trained):
            self.actors.engines.make_way()
        self.saver.save(self.last_trained, self.reporter.recorded(self.last_trained + 1))
        self.saver.finish()
        if self.background_eval is not None:
            self.background_eval.collect()
            if (step := self.background_eval.step) is not None:
                self.reporter.print(f"the evaluation after step {step} has not ended; it has no result")

    def rescue(self) -> None:
        """Record and save the trained steps. Raises nothing: the error that ended the run must stay visible.

        A step whose training was finished counts, although the error kept it from its end.
        """
        try:
            if self.unrecorded is not None:
                self.reporter.record(*self.unrecorded)
        except Exception as error:  # of a full disk, or the one that ended the run: a metric that is a list
            logger.warning("the metrics of step %d could not be written: %s", self.last_trained + 1, error)
        if not self.saver.is_behind(self.last_trained):
            return
        try:
            self.reporter.print(
                f"the run failed; saving the trained steps (up to {self.last_trained + 1}) before it ends"
            )
            self._check_trainers()
            self.actors.buffer.check(_TIMEOUT_S)
            self.end_early()
        except (Exception, KeyboardInterrupt) as error:  # any failure here would hide the first one
            reason = root_cause(error)
            logger.warning("the trained steps could not be saved: %s", headline(str(reason)) or type(reason).__name__)

    def _check_trainers(self) -> None:
        """Raise if a rank is dead, waits for another, has older weights, or has learned a part of the next rollout."""
        if self.actors.recovery.is_behind:
            raise RuntimeError(f"the trainers did not come back with the weights of step {self.last_trained + 1}")
        try:
            ranks = get(self.actors.trainers.call("last_trained"), _TIMEOUT_S)
        except TimeoutError:
            raise TimeoutError("the trainers wait for each other") from None
        if any(rollout_id is None or rollout_id > self.last_trained for rollout_id in ranks):
            raise RuntimeError(f"the error interrupted the training of step {self.last_trained + 2}")


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
        actors.recovery.begin(saver, latest)
        run = Run(config, plan, path, actors, reporter, saver, stop, last + 1, last)
        try:
            loop(run)
            actors.recovery.retry(saver.finish_last, of_engines=plan.takes_turns)
            exported: Path | None = None
            if config.checkpoint.save_hf is not None and actors.trainers:
                progress.status("saving the Hugging Face folder")
                last = plan.num_rollout - 1
                exported = Path(config.checkpoint.save_hf.format(rollout_id=last))
                if run.first_rollout > last and exported_rollout(path, exported) == last:
                    progress.print(f"--save-hf: {exported} has the weights after step {last + 1} already")
                else:
                    actors.close_profile()
                    actors.engines.make_way()
                    with phase("save hf"):
                        gather([trainer.save_hf.remote(str(exported)) for trainer in actors.trainers.policy])
                    note_export(path, exported, last)
        except Terminated:
            if plan.engines_give_memory:  # they end first; else the checkpoint comes first
                actors.close_profile()
            run.end_early()
            raise
        except BaseException as error:
            if isinstance(error, Exception) or actors.is_stalled(error):  # Ctrl-C saves nothing
                run.rescue()
            raise
        title = f"{path.resolve().name} ({config.run.mode})"
        rows = read_metrics(path)
        drawing = drawing_thread.submit(_draw, rows, path / "curves.png", title)  # while actors end
    drawing.result()
    if exported is not None:
        write_model_card(exported, config, plan, rows, path / "curves.png")
        forget_export(path)
    _tell_repeatability(config, plan, path, rows, progress)


def _draw(rows: list[dict[str, object]], out: Path, title: str) -> None:
    """Draw the curves, if there are any: a user's function may log the metrics in its own way."""
    try:
        draw_curves(rows, out, title)
    except ValueError as error:
        logger.info("no curves: %s", error)


def _tell_repeatability(
    config: Config, plan: Plan, path: Path, rows: list[dict[str, object]], progress: Progress
) -> None:
    """Print whether the run repeats bit by bit and why not, and write it into the run's folder."""
    depends_on_batch = any(DEPENDS_ON_BATCH in line for line in _log_lines(path / "logs"))
    record = config.pipelining.replay_schedule if is_streamed(config) else None
    finding = repeatability(
        config,
        plan,
        rows,
        depends_on_batch=depends_on_batch,
        has_external=any(engine["state"] != "refused" for engine in read_states(path)),
        outlasts_record=record is not None and outlasts_record(path, Path(record)),
    )
    progress.print(finding.describe())
    write_atomically(path / REPEATABLE, json.dumps(finding.to_dict(), indent=2) + "\n")


def _log_lines(folder: Path) -> Iterator[str]:
    """Lines of the engines' logs, which may be larger than the memory."""
    for log in folder.glob("engine-*.log"):
        with log.open(encoding="utf-8", errors="replace") as file:
            yield from file
