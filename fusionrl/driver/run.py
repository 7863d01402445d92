"""The driver: one function a mode or pipeline, each readable on one screen. It holds references, never samples."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from fusionrl.algorithms.mismatch_report import mismatch_warning
from fusionrl.buffer.actor import Rollout
from fusionrl.buffer.eval_metrics import eval_table
from fusionrl.cluster.checkpoints import Checkpoint, Checkpoints
from fusionrl.cluster.session import Session
from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of, hook_paths
from fusionrl.observe.advice import AdviceSettings, Watches
from fusionrl.observe.curves import draw_curves
from fusionrl.observe.metrics import MetricsSink, read_metrics
from fusionrl.observe.progress import Progress
from fusionrl.observe.show import sample_table
from fusionrl.plan.plan import Plan

logger = logging.getLogger(__name__)


class Terminated(Exception):
    """SIGTERM arrived: what is trained is saved, then the run ends."""


@dataclass
class Run:
    """What a pipeline works with."""

    config: Config
    plan: Plan
    path: Path
    session: Session
    metrics: MetricsSink
    progress: Progress
    checkpoints: Checkpoints
    first_rollout: int  # 0, or the one after the checkpoint that the run goes on from
    last_trained: int  # the last rollout whose training is finished; -1: none yet
    last_saved: int = -1
    last_step: int = -1  # what was recorded last, for the manifest of a checkpoint
    last_values: dict[str, float] = field(default_factory=dict)
    _pending: _Pending | None = None
    _mismatch: _MismatchWatch = field(default_factory=lambda: _MismatchWatch())
    _watches: Watches = field(init=False)

    def __post_init__(self) -> None:
        self._watches = Watches(advice_settings(self.config, self.path))

    # -------------------------------------------------------------------------------- pieces of a loop
    def record(self, step: int, values: dict[str, float]) -> None:
        """One line of metrics.jsonl, and the display. `step` counts finished rollouts."""
        self.metrics.log(step, values)
        if warning := self._mismatch.look(step, values, mask_functions(self.config)):
            self._warn(step, [warning])
        self._warn(step, self._watches.after_step(step, values))
        self.last_step, self.last_values = step, {name: float(value) for name, value in values.items()}
        shown = {name: values[key] for name, key in _SHOWN.items() if key in values}
        accuracies = [v for k, v in values.items() if k.startswith("eval/") and k.endswith("/accuracy")]
        if accuracies:
            shown["eval_accuracy"] = sum(accuracies) / len(accuracies)
        self.progress.update(step, shown)

    def generate(self, rollout_id: int) -> Rollout:
        """The next rollout; shows --log-samples of it, and warns where there is nothing to learn from it."""
        rollout, step = self.session.generate(rollout_id), rollout_id + 1
        if rollout.glimpses:
            self.progress.print(sample_table(rollout.glimpses, step, self.progress.width))
        if rollout.facts is not None:
            self._warn(step, self._watches.after_rollout(step, rollout.facts))
        return rollout

    def _warn(self, step: int, texts: list[str]) -> None:
        for text in texts:
            logger.warning("step %d: %s", step, text)  # on the console too, above the panel

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate, and say the result."""
        self.progress.status("evaluating")
        values = self.session.evaluate(step)
        for name, value in values.items():
            if name.endswith("/accuracy"):
                reward = values[name.replace("/accuracy", "/reward")]
                self.progress.print(f"step {step}: {name} {value:.4f} (mean reward {reward:.4f})")
        return values

    def validate(self, step: int) -> dict[str, float]:
        """Validation losses of --mode sft, and say them."""
        self.progress.status("validating")
        values = self.session.validation_losses()
        for name, value in values.items():
            if name.endswith("/loss"):
                self.progress.print(f"step {step}: {name} {value:.4f}")
        return values

    def is_eval_due(self, step: int) -> bool:
        """Every --eval-interval steps, and after the last one."""
        interval = self.config.eval.eval_interval
        return interval is not None and (step % interval == 0 or step == self.plan.num_rollout)

    def save_if_due(self, rollout_id: int) -> None:
        """Every --save-interval steps, and after the last one. What --async-save began is published when written."""
        interval = self.config.checkpoint.save_interval
        is_last = rollout_id + 1 == self.plan.num_rollout
        self.finish_save(wait=False)
        if is_last or (interval is not None and (rollout_id + 1) % interval == 0):
            self.save(rollout_id)

    def save(self, rollout_id: int) -> None:
        """Publish a checkpoint that contains the training of `rollout_id`; with --async-save, begin to."""
        options = self.config.checkpoint
        if options.no_save or rollout_id < 0 or rollout_id == self.last_saved:
            return
        self.finish_save()
        self.progress.status("saving a checkpoint")
        metrics = self.last_values if self.last_step == rollout_id + 1 else {}
        facts = {"mode": self.config.run.mode, "world_size": len(self.session.trainers), "metrics": metrics}
        if options.verify_checkpoints:
            facts["hashes"] = self.session.state_hashes()
        start = time.perf_counter()
        folder = self.checkpoints.begin(rollout_id)
        with self.checkpoints.discarding(folder):
            self.session.begin_save(folder, rollout_id)
        self._pending = _Pending(rollout_id, folder, facts | {"seconds_stopped": time.perf_counter() - start})
        self.last_saved = rollout_id
        if not options.async_save:
            self.finish_save()

    def finish_save(self, wait: bool = True) -> None:
        """Publish the checkpoint that is being written, if any; without `wait` only if its files are there."""
        if self._pending is None or not (wait or self.session.trainers.is_saved()):
            return
        pending, options = self._pending, self.config.checkpoint
        self._pending = None
        with self.checkpoints.discarding(pending.folder):
            self.session.trainers.finish_save()
            self.checkpoints.publish(pending.rollout_id, pending.folder, pending.facts)
        if options.keep_checkpoints is not None:
            self.checkpoints.prune(options.keep_checkpoints, options.keep_best)


@dataclass
class _Pending:
    """A checkpoint whose files are being written in `folder`."""

    rollout_id: int
    folder: Path
    facts: dict[str, Any]


class _MismatchWatch:
    """Says when engine and trainers disagree about log-probs; the same again only after some steps."""

    QUIET_STEPS = 20

    def __init__(self) -> None:
        self._earlier: list[float] = []
        self._told_at: int | None = None

    def look(self, step: int, values: dict[str, float], functions: Sequence[str] = ()) -> str | None:
        found = {name.removeprefix("train/"): value for name, value in values.items() if name.startswith("train/")}
        mean = sum(self._earlier) / len(self._earlier) if self._earlier else None
        warning = mismatch_warning(found, earlier_mean=mean, functions=functions)
        self._earlier = [*self._earlier, *([found["logprob_diff_mean"]] if "logprob_diff_mean" in found else [])][-50:]
        if warning is None or (self._told_at is not None and step - self._told_at < self.QUIET_STEPS):
            return None
        self._told_at = step
        return warning


def mask_functions(config: Config) -> list[str]:
    """The user's functions that may write masks and log-probs of samples, each with its flag."""
    defaults, given = vars(Config().to_args()), vars(config.to_args())
    fields = ("custom_generate_function_path", "rollout_function_path", "rollout_sample_hook_path")
    fields += ("custom_convert_samples_to_train_data_path",)
    paths = [(field, path) for field, path in hook_paths(given) if field in fields and path != defaults[field]]
    return [f"{flag_of(field)} {path}" for field, path in paths]


def advice_settings(config: Config, path: Path) -> AdviceSettings:
    """The values of flags that warnings about a rollout name."""
    algorithm, rollout = config.algorithm, config.rollout
    terms = {
        "--use-kl-loss": algorithm.use_kl_loss and algorithm.kl_loss_coef > 0,
        "--entropy-coef": algorithm.entropy_coef > 0,
        "--moe-aux-loss-coeff": bool(config.passthrough.transformer.get("moe_aux_loss_coeff")),
    }
    return AdviceSettings(
        run=str(path),
        estimator=algorithm.advantage_estimator,
        label_key=config.data.label_key,
        max_response_len=rollout.rollout_max_response_len,
        max_context_len=rollout.rollout_max_context_len,
        temperature=rollout.rollout_temperature,
        ignores_eos=rollout.rollout_ignore_eos,
        other_terms=tuple(flag for flag, is_on in terms.items() if is_on),
        threshold=config.reject_sampling.reject_sampling_threshold if config.run.mode == "reject-sampling" else None,
    )


_SHOWN = {
    "reward": "rollout/raw_reward",
    "accuracy": "rollout/accuracy",
    "loss": "train/loss",
    "mismatch": "train/logprob_diff_mean",
    "tokens_per_s": "perf/tokens_per_s",
    "time_generate_s": "perf/time_generate_s",
    "time_train_s": "perf/time_train_s",
    "time_sync_s": "perf/time_sync_s",
}


# ------------------------------------------------------------------------------------------------ pipelines
def on_policy(run: Run) -> None:
    """generate → train → push, one after the other: every sample is of the newest weights."""
    session = run.session
    values = session.push(version=run.first_rollout)
    if run.config.eval.has_sets and not run.config.eval.skip_eval_before_train and run.first_rollout == 0:
        values |= run.evaluate(0)
    run.record(run.first_rollout, values)
    for rollout_id in range(run.first_rollout, run.plan.num_rollout):
        start = time.perf_counter()
        run.progress.status("generating")
        rollout = run.generate(rollout_id)
        session.release_engine_memory()
        run.progress.status("training")
        values = rollout.metrics | _timed_train(session, rollout)
        run.last_trained = rollout_id
        run.progress.status("pushing weights")
        values |= session.push(version=rollout_id + 1)
        values["perf/step_time_s"] = time.perf_counter() - start
        values["perf/tokens_per_s"] = values["rollout/num_tokens"] / values["perf/step_time_s"]
        if run.is_eval_due(rollout_id + 1):
            values |= run.evaluate(rollout_id + 1)
        run.record(rollout_id + 1, values)
        run.save_if_due(rollout_id)
        session.check_stop()


def sft(run: Run) -> None:
    """Supervised training: conversations → train. No engines."""
    has_sets, skip = run.config.eval.has_sets, run.config.eval.skip_eval_before_train
    if has_sets and run.first_rollout == 0 and not skip:
        run.record(0, run.validate(0))
    for rollout_id in range(run.first_rollout, run.plan.num_rollout):
        start = time.perf_counter()
        rollout = run.generate(rollout_id)
        values = rollout.metrics | _timed_train(run.session, rollout)
        run.last_trained = rollout_id
        values["perf/step_time_s"] = time.perf_counter() - start
        values["perf/tokens_per_s"] = values["train/num_tokens"] / values["perf/step_time_s"]
        if run.is_eval_due(rollout_id + 1):
            values |= run.validate(rollout_id + 1)
        run.record(rollout_id + 1, values)
        run.save_if_due(rollout_id)
        run.session.check_stop()


def reject_sampling(run: Run) -> None:
    """Generate and keep what the reward accepts, in the form that `sft` reads; weights are pushed once."""
    values = run.session.push(version=0) if run.session.trainers else {}
    num_accepted = num_considered = 0
    for rollout_id in range(run.first_rollout, run.plan.num_rollout):
        start = time.perf_counter()
        rollout = run.generate(rollout_id)
        values |= rollout.metrics
        values["perf/step_time_s"] = time.perf_counter() - start
        values["perf/tokens_per_s"] = values["rollout/num_tokens"] / values["perf/step_time_s"]
        run.record(rollout_id + 1, values)
        run.save_if_due(rollout_id)
        run.session.check_stop()
        num_accepted += int(values["rollout/accepted"])
        num_considered += int(values["rollout/considered"])
        values = {}
    output = run.config.reject_sampling.reject_sampling_output or run.path / "accepted.jsonl"
    run.progress.print(f"accepted {num_accepted} of {num_considered} samples: {output}")


def rollout_only(run: Run) -> None:
    """--debug-rollout-only: engines and Buffer without trainers."""
    for rollout_id in range(run.first_rollout, run.plan.num_rollout):
        rollout = run.generate(rollout_id)
        run.record(rollout_id + 1, rollout.metrics)
        run.session.check_stop()


def train_only(run: Run) -> None:
    """--debug-train-only: trainers on saved rollouts without engines."""
    for rollout_id in range(run.first_rollout, run.plan.num_rollout):
        rollout = run.generate(rollout_id)
        values = rollout.metrics | _timed_train(run.session, rollout)
        run.last_trained = rollout_id
        run.record(rollout_id + 1, values)
        run.save_if_due(rollout_id)
        run.session.check_stop()


def evaluate_only(run: Run) -> None:
    """Evaluate the checkpoint that the engines loaded, and show all of the result."""
    values = run.evaluate(0)
    run.record(0, values)
    run.progress.print(eval_table(values))


PIPELINES = {"on-policy": on_policy}


def choose_loop(config: Config) -> object:
    """The function that runs this configuration."""
    if config.run.debug_rollout_only:
        return rollout_only
    if config.run.debug_train_only and config.run.mode == "rl":
        return train_only
    if config.run.mode == "rl":
        return PIPELINES[config.run.pipeline]
    return {"sft": sft, "reject-sampling": reject_sampling, "eval": evaluate_only}[config.run.mode]


def _timed_train(session: Session, rollout: Rollout) -> dict[str, float]:
    start = time.perf_counter()
    values = session.trainers.train(rollout.rollout_id, rollout.shards, rollout.auxiliary_shards)
    values["perf/time_train_s"] = time.perf_counter() - start
    if session.config.run.mode == "rl":
        session.add_trained(rollout.rollout_id)
    return values


# ------------------------------------------------------------------------------------------------ a run
def run_training(config: Config, plan: Plan, path: Path, attempt: int, progress: Progress) -> None:
    """Start everything, run the loop, end everything. SIGTERM ends it after a checkpoint.

    Raises:
        Terminated: after SIGTERM, when the checkpoint is written and every process has ended.
    """
    stop = _StopSignal()
    checkpoints = Checkpoints(path / "checkpoints")
    latest = checkpoints.latest() if config.run.resume else None
    if latest is not None:
        checkpoints.check(latest)
    total = max(1, plan.num_rollout)
    loop = choose_loop(config)
    with (
        stop,
        Session(
            config, plan, path, attempt, say=progress.status, check_stop=stop.check, on_ray=stop.install
        ) as session,
        MetricsSink(path, attempt, config.run.use_tensorboard) as metrics,
    ):
        first = 0
        if config.run.resume and latest is None:
            progress.print(f"--resume: {checkpoints.folder} has no finished checkpoint; the run starts at step 0")
        if latest is not None:
            progress.print(f"going on from {latest.path}, after step {latest.rollout_id + 1} of {total}")
            session.load(latest.path)
            if config.checkpoint.verify_checkpoints:
                _compare_hashes(latest, session.state_hashes(), same_layout=session.rng_restored)
            first = latest.rollout_id + 1
        run = Run(config, plan, path, session, metrics, progress, checkpoints, first, first - 1, first - 1)
        try:
            loop(run)  # type: ignore[operator]
            run.finish_save()
            if config.checkpoint.save_hf is not None and session.trainers:
                progress.status("saving the Hugging Face folder")
                session.trainers.save_hf(Path(config.checkpoint.save_hf.format(rollout_id=plan.num_rollout - 1)))
        except Terminated:
            if session.trainers:
                run.save(run.last_trained)
                run.finish_save()
            raise
    draw_curves(read_metrics(path), path / "curves.png", f"{config.run.name} ({config.run.mode})")


def _compare_hashes(checkpoint: Checkpoint, found: dict[str, Any], same_layout: bool) -> None:
    """Raise where what was loaded is not, bit by bit, what was saved; ranks of another layout have other parts."""
    saved = checkpoint.manifest.get("hashes")
    if saved is None:
        return
    wrong = ["the data cursor"] if saved["buffer"] != found["buffer"] else []
    if same_layout:
        for rank, (before, after) in enumerate(zip(saved["trainers"], found["trainers"], strict=True)):
            wrong += [f"{name} of trainer {rank}" for name in before if before[name] != after[name]]
    if wrong:
        raise ValueError(
            f"--verify-checkpoints: {checkpoint.path} was loaded, but {', '.join(wrong)} is not what was saved; "
            "its files have changed: delete that folder and resume from the one before it"
        )


class _StopSignal:
    """Turns the first SIGTERM into a request that the loop finds at its next step; a second one acts as Ctrl-C."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def __enter__(self) -> _StopSignal:
        self._before = signal.getsignal(signal.SIGTERM)
        self.install()
        return self

    def install(self) -> None:
        """Take SIGTERM; again after Ray has started, which takes it for itself."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked.is_set():
            raise KeyboardInterrupt
        self._asked.set()

    def check(self) -> None:
        """Raise Terminated once SIGTERM has arrived."""
        if self._asked.is_set():
            raise Terminated("SIGTERM")
