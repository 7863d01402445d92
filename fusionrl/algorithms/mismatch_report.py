"""The warning about a mismatch of engine and trainer, with its likely causes. The driver's part: without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MismatchLimits:
    """From where on `mismatch_warning` speaks. Starting points set by hand, not measured: adapt them to the model.

    token   nats by which a single token counts as off (`logprob_diff_over` is their share)
    mean    nats, of the mean |difference|
    k3      nats, of the estimated KL(engine || trainer)
    ess     lowest effective sample size, as a share of the tokens
    not_sampled  share of tokens that no engine seems to have sampled (`logprob_not_sampled`)
    drift   how many times the mean |difference| of earlier steps it may become, once it is a tenth of `mean`
    """

    token: float = 0.5
    mean: float = 0.05
    k3: float = 0.01
    ess: float = 0.9
    not_sampled: float = 0.001
    drift: float = 5.0


def mismatch_warning(
    metrics: Mapping[str, float],
    limits: MismatchLimits | None = None,
    earlier_mean: float | None = None,
    functions: Sequence[str] = (),
    changed_by: Sequence[str] = (),
) -> str | None:
    """Return the warning about a step's `metrics` of `mismatch_metrics`; None if all is well.

    earlier_mean  `logprob_diff_mean` of earlier steps, to notice a drift below the limits
    functions     the user's functions that write loss masks and log-probs, each with its flag
    changed_by    sampling parameters of the requests that change the policy's distribution
    """
    limits = limits or MismatchLimits()
    mean = metrics.get("logprob_diff_mean", 0.0)
    problems, look = [], []
    if metrics.get("logprob_not_finite", 0.0) > 0:
        problems.append(f"{metrics['logprob_not_finite']:.2%} of the tokens have a log-prob of -inf or NaN")
        look.append("--rollout-top-p and --rollout-top-k (the engine may give log-probs of the cut distribution)")
    not_sampled = metrics.get("logprob_not_sampled", 0.0)
    # What no engine sampled is most of what is off: else engine and trainer differ in other tokens as well.
    is_mask = not_sampled > 0.5 * metrics.get("logprob_diff_over", 0.0)
    off = mean > limits.mean or metrics.get("logprob_k3", 0.0) > limits.k3
    off = off or metrics.get("logprob_ess", 1.0) < limits.ess
    if off:
        problems.append(
            f"mean |difference| {mean:.2g} nats, largest {metrics['logprob_diff_max']:.2g}, k3 KL "
            f"{metrics['logprob_k3']:.2g}, effective sample size {metrics['logprob_ess']:.1%}"
        )
    elif earlier_mean is not None and mean > max(limits.drift * earlier_mean, limits.mean / 10):
        problems.append(f"mean |difference| {mean:.2g} nats, up from {earlier_mean:.2g}")
        off = True
    if is_mask and (off or not_sampled > limits.not_sampled):
        problems.insert(
            0, f"{not_sampled:.1%} of the trained tokens have a log-prob of exactly 0, which no engine gives them"
        )
        look += _mask_suspects(functions)
    elif off and changed_by:
        look.append(
            f"the requests' {', '.join(changed_by)}: the engine's log-probs are those of the changed distribution"
        )
    elif off:
        look += _suspects(metrics)
    if not problems:
        return None
    return f"engine and trainer disagree: {'; '.join(problems)}. Look at: {'; '.join(look)}."


def _mask_suspects(functions: Sequence[str]) -> list[str]:
    """Name what gives a trained token the log-prob 0: a function that masks wrongly, or an engine."""
    if not functions:
        return ["--rollout-top-k and --rollout-top-p (of a distribution cut to one token, that token has log-prob 0)"]
    return [
        f"the loss_mask that {' or '.join(functions)} sets: tokens that a tool or an environment wrote need mask 0, and"
        " without a loss_mask all are trained on (append_text and append_response_tokens(trainable=False) set it;"
        " docs/guides/agents.md)"
    ]


def _suspects(metrics: Mapping[str, float]) -> list[str]:
    """List what is worth a look, the likeliest first, by the shape of the difference."""
    mean, ratio = metrics["logprob_diff_mean"], metrics["logprob_ratio_mean"]
    # Over tokens drawn from the engine's distribution the mean of trainer / engine is 1, however far the two are apart.
    sampling = abs(ratio - 1.0) > max(0.02, 4.0 * metrics["logprob_ratio_error"])
    few = metrics["logprob_diff_over"] < 0.02 and metrics["logprob_diff_max"] > 20 * mean
    settings = (
        "--rollout-temperature, --rollout-top-p and --rollout-top-k (the mean ratio of the probabilities is "
        f"{ratio:.3g} and not 1: the tokens were drawn from another distribution than engine or trainer think)"
    )
    outliers = ["MoE routing that differs between engine and trainer", "the engine's attention backend"]
    everywhere = [
        "the dtype of weights, KV cache and output layer on both sides",
        "the weight version (samples of older weights, or weights that did not arrive)",
        "the temperature on both sides",
    ]
    if sampling:
        return [settings]
    return outliers + everywhere if few else everywhere + outliers
