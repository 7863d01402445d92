"""Tokens and lengths of a stream: what is generated, trained and dropped, and if long answers are trained as often.

Tokens are those of responses, tools' tokens included.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fusionrl.data.sample import UNKNOWN_VERSION, Sample, Status, response_mask

_FAILED = (Status.FAILED, Status.ABORTED)


class Tally:
    """Counts since the last batch, but the lengths, which are of the whole run.

    A sample counts once as generated, when its group ends or is dropped, and at most once as trained or dropped. Of a
    group that is dropped under way the samples that have ended count; what engines had of the others nobody knows.
    """

    def __init__(self, *, counts_prefills: bool) -> None:
        """`counts_prefills`: a push lets running samples go on, with their KV cache computed again."""
        self._counts_prefills = counts_prefills
        self._generated = self._dropped = self._prefilled = 0
        self._offered, self._trained = _Lengths(), _Lengths()

    def generated(self, samples: Iterable[Sample]) -> None:
        """Count the samples of a group that the engines have answered."""
        for sample in samples:
            self._generated += sample.response_length
            if self._counts_prefills:
                self._prefilled += prefilled_again(sample)
            if sample.response_length and sample.status not in _FAILED:
                self._offered.add(sample)

    def dropped(self, samples: Iterable[Sample]) -> None:
        """Count samples that were generated and will not be trained."""
        self._dropped += sum(sample.response_length for sample in samples)

    def take(self, groups: Iterable[Iterable[Sample]]) -> dict[str, float]:
        """Return the metrics of a batch that trains `groups`, and begin anew."""
        num_trained = 0
        for sample in (sample for group in groups for sample in group):
            counts = int((response_mask(sample) > 0).sum())
            num_trained += counts
            if counts:
                self._trained.add(sample)
        metrics = {
            "pipeline/tokens_generated": float(self._generated),
            "pipeline/tokens_trained": float(num_trained),
            "pipeline/tokens_dropped": float(self._dropped),
            "pipeline/tokens_prefilled_again": float(self._prefilled),
        }
        self._generated = self._dropped = self._prefilled = 0
        if self._trained.count and self._offered.count:
            metrics["pipeline/length_trained_by_offered"] = self._trained.mean / self._offered.mean
        return metrics


class _Lengths:
    def __init__(self) -> None:
        self.count = self.total = 0

    def add(self, sample: Sample) -> None:
        self.count += 1
        self.total += sample.response_length

    @property
    def mean(self) -> float:
        return self.total / self.count


def prefilled_again(sample: Sample) -> int:
    """Return the tokens whose KV cache engines computed again under new weights: at each change of the version within
    the response, the prompt and the tokens before it.
    """
    versions = sample.array("weight_versions")
    if versions is None or not len(versions):
        return 0
    known = np.flatnonzero(versions != UNKNOWN_VERSION)
    changes = known[1:][np.diff(versions[known]) != 0]
    prompt = sample.num_tokens - sample.response_length
    return int((prompt + changes).sum())
