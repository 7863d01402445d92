"""Settings of the warnings that the driver gives about a step, and the one about engines and trainers that disagree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fusionrl.algorithms.mismatch_report import MismatchLimits, mismatch_warning
from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of, hook_paths
from fusionrl.config.run_parts import estimator_of
from fusionrl.observe.advice import AdviceSettings

_MASK_HOOKS = (
    "custom_generate_function_path",
    "rollout_function_path",
    "rollout_sample_hook_path",
    "custom_convert_samples_to_train_data_path",
)


class MismatchWatch:
    """Says when engine and trainers disagree about log-probs; the same again only after some steps."""

    QUIET_STEPS = 20

    def __init__(self, is_fp32: bool = False) -> None:
        """`is_fp32`: engines and trainers both compute in fp32, where 1e-6 is usual."""
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
    defaults, given = vars(Config().to_args()), vars(config.to_args())
    paths = [(name, path) for name, path in hook_paths(given) if name in _MASK_HOOKS and path != defaults[name]]
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
