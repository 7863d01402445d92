"""Trained tokens that no engine sampled, found by comparing a sample with the engines' answers to its function.

A function that puts a tool's text into the response and sets no `loss_mask` trains on that text. Where it hands over
log-probs too, the trainers see zeros among them; where it does not, only the answers tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusionrl.data.sample import Sample, response_mask
from fusionrl.data.token_versions import UNKNOWN_VERSION
from fusionrl.rollout.weight_versions import EngineAnswers, OriginalResponse, common_prefix, places_of, warn_once

_FEW = 2  # tokens that a function may add by hand: an end of the text, a line's end
_ATTRIBUTE = "num_unsampled"


def num_unsampled(sample: Sample) -> int:
    """Return how many trained tokens are surely no engine's; --mode reject-sampling accepts no such sample."""
    return int(vars(sample).get(_ATTRIBUTE, 0))


def warn_of_unsampled(samples: Sequence[Sample], answers: EngineAnswers, where: str, before: OriginalResponse) -> None:
    """Warn, once for each function `where`, of trained tokens that are in none of the engines' answers.

    Only of samples in which at least one whole answer stands: others were made of something else than these answers (by
    another client, or the answers were a judge's), or were tokenized anew.

    Args:
        samples: as the function left them.
        answers: to its requests by `fusionrl.plugin_api.post`; without any, nothing is known.
        where: flag and path of the function.
        before: the sample's response before the function had it: an earlier rollout's tokens were sampled.
    """
    for sample in samples:
        vars(sample).pop(_ATTRIBUTE, None)
    parts = [tokens for tokens, _, _ in answers.parts]
    if not parts or not all(len(tokens) for tokens in parts):
        return
    for sample in samples:
        try:
            tokens = np.asarray(sample.array("tokens"), np.int32)
            response = tokens[len(tokens) - sample.response_length :]
            trained = response_mask(sample) > 0
        except (TypeError, ValueError, OverflowError):
            continue  # fields that do not fit are for `check_samples` to name
        if len(trained) != len(response) or _names_versions(sample):
            continue
        sampled, has_whole = found_in(response, parts)
        size = len(before.response)
        if np.array_equal(response[:size], before.response):
            sampled[:size] = True
        missing = int((trained & ~sampled).sum())
        if not missing or not has_whole:
            continue
        if missing > _FEW:
            vars(sample)[_ATTRIBUTE] = missing
        warn_once(
            f"unsampled {where}",
            f"{where}: {missing} of the {int(trained.sum())} tokens that sample {sample.index} is trained on are in"
            " no answer of the engines: give them 0 in sample.loss_mask, or append them by append_text; or, if a"
            " tokenizer made them anew of the answer's text, take the tokens of the answer (docs/guides/agents.md)",
        )


def _names_versions(sample: Sample) -> bool:
    """Return whether the function has named the version of each token, and so knows what was sampled."""
    versions = vars(sample)["weight_versions"]
    if versions is None or len(versions) != sample.response_length or not len(versions):
        return False
    return all(isinstance(version, (int, np.integer)) and version != UNKNOWN_VERSION for version in versions)


def found_in(response: np.ndarray, parts: Sequence[np.ndarray]) -> tuple[np.ndarray, bool]:
    """Return which tokens of `response` [n] belong to one of `parts`, [n] bool, and whether it holds a whole part.

    Wherever a part stands as a whole, it counts. A stretch that is left may begin with a part that was cut.
    """
    response, parts = response.astype(np.int32), [np.asarray(part, np.int32) for part in parts]
    is_covered = np.zeros(len(response), bool)
    for part in parts:
        for place in places_of(part, response):
            is_covered[place : place + len(part)] = True
    has_whole = bool(is_covered.any())
    for start in [i for i in np.flatnonzero(~is_covered) if i == 0 or is_covered[i - 1]]:
        cut = max((common_prefix(response[start:], part) for part in parts), default=0)
        is_covered[start : start + cut] = True
    return is_covered, has_whole
