"""`Reporter`: numbers of a run for metrics.jsonl, the display and the console, with the warnings that they call for."""

from __future__ import annotations

import logging
from pathlib import Path

from fusionrl.buffer.actor import Rollout
from fusionrl.config.config import Config
from fusionrl.observe.advice import Watches
from fusionrl.observe.metrics import MetricsSink
from fusionrl.observe.progress import Progress
from fusionrl.observe.show import sample_table
from fusionrl.runtime.step_warnings import MismatchWatch, advice_settings, mask_functions

logger = logging.getLogger(__name__)

_SHOWN = {
    "reward": "rollout/raw_reward",
    "accuracy": "rollout/accuracy",
    "loss": "train/loss",
    "mismatch": "train/logprob_diff_mean",
    "tokens_per_s": "perf/tokens_per_s",
    "staleness": "rollout/staleness/token_mean",
    "staleness_max": "rollout/staleness/token_max",
    "in_flight": "pipeline/in_flight",
    "ready": "pipeline/ready",
    "engines_idle": "perf/engines_idle",
    "trainers_idle": "perf/trainers_idle",
    "time_generate_s": "perf/time_generate_s",
    "time_train_s": "perf/time_train_s",
    "time_sync_s": "perf/time_sync_s",
}


class Reporter:
    """Says what a run does, and how it goes."""

    def __init__(
        self, config: Config, path: Path, metrics: MetricsSink, progress: Progress, is_fp32: bool = False
    ) -> None:
        self._config, self._metrics, self._progress = config, metrics, progress
        self._mismatch = MismatchWatch(is_fp32)
        self._watches = Watches(advice_settings(config, path))
        self._last_step = -1
        self._last_values: dict[str, float] = {}

    def status(self, text: str) -> None:
        """Show which phase of a step the run is in."""
        self._progress.status(text, recurs=True)

    def print(self, text: str) -> None:
        """A line for the console."""
        self._progress.print(text)

    def record(self, step: int, values: dict[str, float]) -> None:
        """One line of metrics.jsonl, and the display. `step` counts finished rollouts."""
        self._metrics.log(step, values)
        if warning := self._mismatch.look(step, values, mask_functions(self._config), self._watches.changed_by):
            self._warn(step, [warning])
        self._warn(step, self._watches.after_step(step, values))
        self._last_step, self._last_values = step, {name: float(value) for name, value in values.items()}
        shown = {name: values[key] for name, key in _SHOWN.items() if key in values}
        self._progress.update(step, shown | _eval_accuracy(values))

    def recorded(self, step: int) -> dict[str, float]:
        """The values of `step`, for the manifest of a checkpoint, if they were the last to be recorded."""
        return self._last_values if self._last_step == step else {}

    def show_rollout(self, rollout: Rollout) -> None:
        """--log-samples of a rollout, and a warning where there is nothing to learn from it."""
        step = rollout.rollout_id + 1
        if rollout.glimpses:
            self._progress.print(sample_table(rollout.glimpses, step, self._progress.width))
        if rollout.facts is not None:
            self._warn(step, self._watches.after_rollout(step, rollout.facts))

    def record_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Another line of metrics.jsonl for `step`, of an evaluation that ended when later steps had begun."""
        self._metrics.log(step, values)
        self._warn(step, self._watches.after_step(step, values))
        self._progress.update(max(step, self._last_step), _eval_accuracy(values))
        self.show_evaluation(step, values)

    def show_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Accuracy and reward of each set."""
        for name, value in values.items():
            if name.endswith("/accuracy"):
                reward = values[name.replace("/accuracy", "/reward")]
                self._progress.print(f"step {step}: {name} {value:.4f} (mean reward {reward:.4f})")

    def show_validation(self, step: int, values: dict[str, float]) -> None:
        """The loss of each set (--mode sft)."""
        for name, value in values.items():
            if name.endswith("/loss"):
                self._progress.print(f"step {step}: {name} {value:.4f}")

    def _warn(self, step: int, texts: list[str]) -> None:
        for text in texts:
            logger.warning("step %d: %s", step, text)  # on the console too, above the panel


def _eval_accuracy(values: dict[str, float]) -> dict[str, float]:
    """The display's value of an evaluation, the mean over its sets; none where `values` have no evaluation."""
    accuracies = [v for k, v in values.items() if k.startswith("eval/") and k.endswith("/accuracy")]
    return {"eval_accuracy": sum(accuracies) / len(accuracies)} if accuracies else {}
