"""Lengths of modelled answers: the same for the same prompt in every run, and so for every pipeline."""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Lengths:
    """Lognormal lengths. The n-th request for a prompt gets the prompt's n-th length, from whichever engine."""

    median: float = 1000.0
    sigma: float = 1.05
    longest: int = 28_672  # tokens after which an answer is cut off
    prompt: int = 256
    seed: int = 0
    _asked: Counter[int] = field(default_factory=Counter)

    def next_of(self, prompt: Sequence[int]) -> int:
        """Return the length of the next answer to these tokens."""
        key = zlib.crc32(np.asarray(prompt, np.int32).tobytes(), self.seed)
        number = self._asked[key]
        self._asked[key] += 1
        return self.of(key, number)

    def of(self, key: int, number: int) -> int:
        """Return the length of answer `number` of a prompt."""
        drawn = np.random.default_rng((self.seed, key, number)).lognormal(np.log(self.median), self.sigma)
        return int(min(self.longest, max(1.0, drawn)))

    def mean(self) -> float:
        """Return the mean over many answers."""
        drawn = np.random.default_rng(self.seed).lognormal(np.log(self.median), self.sigma, 200_000)
        return float(np.clip(drawn, 1.0, self.longest).mean())
