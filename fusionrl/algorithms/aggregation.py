"""Aggregation of the losses of tokens into one number."""

import numpy as np


def token_weights(
    mask: np.ndarray,
    kind: str,
    num_tokens: float,
    num_samples: int,
    constant: float | None = None,
    attempt_tokens: float | None = None,
) -> np.ndarray:
    """Weights of one sample's tokens: the loss is their sum of `weight * loss` over all samples of the optimizer step.

        token_mean      mask / num_tokens                        DAPO (arXiv 2503.14476), section 3.3
        sequence_mean   mask / (num_samples * attempt_tokens)    GRPO (arXiv 2402.03300), equation 3
        constant        mask / (num_samples * constant)          Dr. GRPO (arXiv 2503.20783), section 3.2

    The counts are those of the whole step over all ranks, so no split changes the loss. A sample without trained tokens
    (removed by a filter, masked, failed) weighs nothing and still counts in num_samples: in the papers' 1/G, G is the
    number of answers that were sampled, whatever becomes of them.

    Args:
        mask: [L] of the sample's response; 0 where a token is not trained on.
        kind: see above.
        num_tokens: the sum of all masks.
        num_samples: how many attempts the step has, those without trained tokens included. An attempt is one sample, or
            several that share a `rollout_id`.
        constant: for "constant": the same length for all samples, such as the longest response allowed.
        attempt_tokens: for "sequence_mean": the sum of the masks of all samples of the attempt. None: of this one.

    Returns:
        [L] float64.
    """
    mask = np.asarray(mask, np.float64)
    if kind == "token_mean":
        return mask / max(num_tokens, 1.0)
    if kind == "sequence_mean":
        return mask / max(num_samples * float(mask.sum() if attempt_tokens is None else attempt_tokens), 1e-12)
    assert kind == "constant" and constant, f"{kind}: the flags' check asks for a length"
    return mask / (max(num_samples, 1) * constant)
