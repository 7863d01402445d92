"""Prompts in the order in which they are drawn: one set epoch after epoch, or several mixed by weight.

Where a set stands is one number, how many of its prompts were drawn, and everything follows from these numbers: a
set's epoch and offset, its order in that epoch (with the seed), and the set that is drawn next.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fusionrl.data.sample import Sample


class PromptSequence:
    """The prompts of one set, without end; `seed` and epoch shuffle them, None leaves them as they stand."""

    def __init__(self, prompts: Sequence[Sample], seed: Sequence[int] | None) -> None:
        self.prompts = prompts
        self.num_drawn = 0
        self._seed = seed
        self._order_epoch = -1
        self._order = np.arange(len(prompts))

    def draw(self) -> Sample:
        """The next prompt itself, not a copy."""
        epoch, offset = divmod(self.num_drawn, len(self.prompts))
        if self._seed is not None and epoch != self._order_epoch:
            seed, *stream = self._seed
            self._order = np.random.default_rng([seed, epoch, *stream]).permutation(len(self.prompts))
            self._order_epoch = epoch
        self.num_drawn += 1
        return self.prompts[self._order[offset]]


class Mixture:
    """Several sequences in the proportions of their weights.

    Drawn is the set that is furthest behind: of n draws, set k with share w_k is due w_k n, and the next draw goes to
    the greatest w_k (n + 1) - drawn_k. No set gets one draw or more beyond its due, and over a span in which all w_k n
    are whole, each gets exactly that. Exact fractions, so that rounding never decides.
    """

    def __init__(self, sequences: Sequence[PromptSequence], weights: Sequence[float] | None = None) -> None:
        """`weights` need not add up to one. Without them a set counts as much as it has prompts."""
        exact = [Fraction(str(w)) for w in weights or [len(sequence.prompts) for sequence in sequences]]
        assert len(exact) == len(sequences) and min(exact) > 0
        self.sequences = sequences
        self.shares = [weight / sum(exact) for weight in exact]

    def draw(self) -> Sample:
        """The next prompt itself, not a copy."""
        number = 1 + sum(sequence.num_drawn for sequence in self.sequences)
        behind = [
            share * number - sequence.num_drawn for share, sequence in zip(self.shares, self.sequences, strict=True)
        ]
        return self.sequences[behind.index(max(behind))].draw()
