"""`Reporter`: numbers of a run for metrics.jsonl, the display and the console, with the warnings that they call for."""

import logging
from collections.abc import Sequence
from pathlib import Path

from fusionrl.algorithms.mismatch_report import MismatchLimits, mismatch_warning
from fusionrl.buffer.rollout_stages import Rollout
from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of, hook_paths
from fusionrl.config.run_parts import estimator_of
from fusionrl.observe.advice import AdviceSettings, Watches
from fusionrl.observe.metrics import MetricsSink
from fusionrl.observe.progress import Progress

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
_MASK_HOOKS = (
    "custom_generate_function_path",
    "rollout_function_path",
    "rollout_sample_hook_path",
    "custom_convert_samples_to_train_data_path",
)


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
        self._progress.print(text)

    def record(self, step: int, values: dict[str, float]) -> None:
        """One line of metrics.jsonl, and the display. `step` counts finished rollouts."""
        self._metrics.log(step, values)
        if warning := self._mismatch.look(step, values, mask_functions(self._config), self._watches.changed_by):
            self._warn(step, [warning])
        self._warn(step, self._watches.after_step(step, values))
        self._last_step, self._last_values = step, {name: float(value) for name, value in values.items()}
        display_values = {name: values[key] for name, key in _SHOWN.items() if key in values}
        self._progress.update(step, display_values | _eval_accuracy(values))

    def recorded(self, step: int) -> dict[str, float]:
        """The values of `step`, for the manifest of a checkpoint, if they were the last to be recorded."""
        return self._last_values if self._last_step == step else {}

    def show_rollout(self, rollout: Rollout) -> None:
        """--log-samples of a rollout, and a warning where there is nothing to learn from it."""
        step = rollout.rollout_id + 1
        if rollout.glimpses:
            from fusionrl.observe.show import sample_table

            self._progress.print(sample_table(rollout.glimpses, step, self._progress.width))
        if rollout.facts is not None:
            self._warn(step, self._watches.after_rollout(step, rollout.facts))

    def record_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Write another line of metrics.jsonl for `step`, for an evaluation that ended during a later step."""
        self._metrics.log(step, values)
        self._warn(step, self._watches.after_step(step, values))
        self._progress.update(max(step, self._last_step), _eval_accuracy(values))
        self.show_evaluation(step, values)

    def show_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Print accuracy and reward of each set, or its loss (--mode sft)."""
        for name, value in values.items():
            if name.endswith(("/accuracy", "/loss")):
                reward = values.get(name.replace("/accuracy", "/reward"), value)
                more = f" (mean reward {reward:.4f})" if name.endswith("/accuracy") else ""
                self._progress.print(f"step {step}: {name} {value:.4f}{more}")

    def _warn(self, step: int, texts: list[str]) -> None:
        for text in texts:
            logger.warning("step %d: %s", step, text)  # on the console too, above the panel


def _eval_accuracy(values: dict[str, float]) -> dict[str, float]:
    """The display's value of an evaluation, the mean over its sets; none where `values` have no evaluation."""
    accuracies = [v for k, v in values.items() if k.startswith("eval/") and k.endswith("/accuracy")]
    return {"eval_accuracy": sum(accuracies) / len(accuracies)} if accuracies else {}


class MismatchWatch:
    """Warns when engine and trainers disagree about log-probs; repeats itself only after some steps."""

    QUIET_STEPS = 20

    def __init__(self, is_fp32: bool = False) -> None:
        """`is_fp32`: engines and trainers both compute in fp32, where differences of 1e-6 are normal."""
        self._limits = MismatchLimits(mean=1e-3) if is_fp32 else MismatchLimits()
        self._earlier: list[float] = []
        self._told_at: int | None = None

    def look(
        self, step: int, values: dict[str, float], functions: Sequence[str] = (), changed_by: Sequence[str] = ()
    ) -> str | None:
        """The warning about a step's metrics, if any; `functions` as of `mask_functions`."""
        metrics = {name.removeprefix("train/"): value for name, value in values.items() if name.startswith("train/")}
        mean = sum(self._earlier) / len(self._earlier) if self._earlier else None
        warning = mismatch_warning(metrics, self._limits, mean, functions, changed_by)
        if "logprob_diff_mean" in metrics:
            self._earlier = [*self._earlier, metrics["logprob_diff_mean"]][-50:]
        if warning is None or (self._told_at is not None and step - self._told_at < self.QUIET_STEPS):
            return None
        self._told_at = step
        return warning


def mask_functions(config: Config) -> list[str]:
    """The user's functions that may write masks and log-probs of samples, each with its flag."""
    defaults, values = vars(Config().to_args()), vars(config.to_args())
    paths = [(name, path) for name, path in hook_paths(values) if name in _MASK_HOOKS and path != defaults[name]]
    return [f"{flag_of(name)} {path}" for name, path in paths]


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
        compares_siblings=estimator_of(algorithm).compares_siblings,
        label_key=config.data.label_key,
        max_response_len=rollout.rollout_max_response_len,
        max_context_len=rollout.rollout_max_context_len,
        temperature=rollout.rollout_temperature,
        ignores_eos=rollout.rollout_ignore_eos,
        reward_timeout_s=config.reward.reward_timeout_s,
        failure_value=config.reward.reward_failure_value,
        other_terms=tuple(flag for flag, is_on in terms.items() if is_on),
        threshold=config.reject_sampling.reject_sampling_threshold if config.run.mode == "reject-sampling" else None,
    )
