"""Log-probs and entropies of a shard's tokens as the losses of its steps saw them (--save-token-values)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from fusionrl.trainer.loss import LossSums


class TokenScores:
    """[2, response tokens] log-probs and entropies of a rank's shard, filled in micro-batch by micro-batch.

    They stay on the device until `flat`, which is asked once a rollout.
    """

    def __init__(self, response_lengths: np.ndarray, device: torch.device) -> None:
        self._ends = np.cumsum(response_lengths)
        self._starts = self._ends - response_lengths
        # The third row says whether a token has values: each is on one context-parallel rank.
        self._values = torch.zeros(3, int(response_lengths.sum()), device=device)

    def add(self, parts: Iterable[LossSums]) -> None:
        """Add the micro-batches of an optimizer step; none but on the last pipeline stage."""
        for part in parts:
            if part.scores is None or part.batch is None or not part.batch.samples:
                continue
            # Places of the micro-batch's response tokens in the shard, one sample after the other.
            stretches = [np.arange(self._starts[sample], self._ends[sample]) for sample in part.batch.samples]
            places = torch.from_numpy(np.concatenate(stretches)).to(self._values.device)
            chosen = places[part.batch.responses.to(places.device)]
            self._values[:2, chosen] = part.scores[:2].to(self._values.dtype)
            self._values[2, chosen] = 1.0

    def flat(self) -> np.ndarray:
        """The values, NaN where a token has none. A collective of the context-parallel ranks."""
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            dist.all_reduce(self._values, group=group)
        values = self._values.cpu().numpy()
        return np.where(values[2] > 0, values[:2], np.nan)
