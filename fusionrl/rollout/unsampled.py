"""Trained tokens that no engine sampled, found by comparing a sample with the engines' answers to its function.

A function that puts a tool's text into the response and sets no `loss_mask` trains on that text. Where it hands over
log-probs too, the trainers see zeros among them; where it does not, only the answers tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusionrl.data.sample import Sample, response_mask
from fusionrl.rollout.versions import Answers, Before, warn_once

UNSAMPLED = "unsampled_tokens"  # metadata of a sample: its trained tokens that stand in no answer


def warn_of_unsampled(samples: Sequence[Sample], answers: Answers, where: str, before: Before) -> None:
    """Warn, once for each function `where`, of trained tokens that stand in none of the engines' answers.

    Each sample that has some says how many in its metadata (`UNSAMPLED`): --mode reject-sampling does not accept it.

    Args:
        samples: as the function left them.
        answers: to its requests by `fusionrl.plugin_api.post`; without any, nothing is known.
        where: flag and path of the function.
        before: the sample's response before the function had it: an earlier rollout's tokens were sampled.
    """
    if not any(len(tokens) for tokens, _ in answers.parts):
        return
    for sample in samples:
        versions = sample.weight_versions
        if versions is not None and len(versions):
            continue  # of functions that name the version of each token, and so know what was sampled
        try:
            response = np.asarray(sample.array("tokens"), np.int32)[sample.num_tokens - sample.response_length :]
            trained = response_mask(sample) > 0
        except (TypeError, ValueError, OverflowError):
            continue  # fields that do not fit are for `check_samples` to name
        if len(trained) != len(response):
            continue
        missing = int(
            (trained & ~found_in(response, [before.response, *(tokens for tokens, _ in answers.parts)])).sum()
        )
        if missing:
            sample.metadata[UNSAMPLED] = missing
            warn_once(
                f"unsampled {where}",
                f"{where}: {missing} of the {int(trained.sum())} tokens that sample {sample.index} is trained on are in"
                " no answer of the engines: give them 0 in sample.loss_mask, or append them by append_text; or, if a"
                " tokenizer made them anew of the answer's text, take the tokens of the answer (docs/multi-turn.md)",
            )


def found_in(response: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """[n] bool: which tokens of `response` [n] belong to one of `parts`, which stand in it in order.

    Of a part that was cut at its end, the longest beginning counts.
    """
    found, start = np.zeros(len(response), bool), 0
    text, size = response.astype(np.int32).tobytes(), 4

    def place_of(part: bytes) -> int | None:
        place = text.find(part, start * size)
        while place >= 0 and place % size:  # within a number
            place = text.find(part, place + 1)
        return place // size if place >= 0 else None

    for tokens in parts:
        part = np.asarray(tokens, np.int32).tobytes()
        short, long = 0, len(tokens)  # a beginning of `short` tokens stands there; one of more than `long` does not
        while short < long:
            middle = (short + long + 1) // 2
            if place_of(part[: middle * size]) is None:
                long = middle - 1
            else:
                short = middle
        if short and (place := place_of(part[: short * size])) is not None:
            found[place : place + short] = True
            start = place + short
    return found
