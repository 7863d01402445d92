"""Seeds of the requests to engines: a run that is started again with the same seed samples the same tokens.

An engine that honours `sampling_seed` draws each token by the seed of its request and the token's position, whatever
else it computes in the same batch. Siblings that ask together have consecutive seeds, so that one request can ask for
all of them (`request_routing.RequestMerger`).
"""

from __future__ import annotations

import hashlib
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_MOST_SIBLINGS = 2**16
_MOST_BEGUN = 2**16  # samples of a stream, of which those that began longest ago are forgotten
_BEGUN = "begun_samples"  # attribute of `args`, of `HookArgs.SHARED`
SEEDED_BY_INDEX = "seeded_by_index"  # attribute of `args`: in a stream a sample has no rollout until it is trained
_lock = threading.Lock()


class SampleSeeds:
    """Seeds of the requests for one sample."""

    def __init__(self, *source: object, number: int) -> None:
        """`source`: what tells the group from others of the run; `number`: that of the sample among its siblings."""
        self._source, self._number = source, number
        self._num_requests: Counter[int] = Counter()

    def next(self, position: int) -> int:
        """Return the seed of a request whose first new token has this position, 31 bits.

        A turn that is tried again, or a branch of a search, has another seed.
        """
        with _lock:
            attempt = self._num_requests[position]
            self._num_requests[position] += 1
        text = repr((*self._source, position, attempt))
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
        return digest % (2**31 - _MOST_SIBLINGS) + self._number % _MOST_SIBLINGS


_seeds: ContextVar[SampleSeeds | None] = ContextVar("seeds", default=None)


def seeds_in_context() -> SampleSeeds | None:
    """Return the seeds of the sample that this code generates; None outside `sampling`."""
    return _seeds.get()


@contextmanager
def sampling(args: Namespace, index: int | None, number: int = 0, evaluation: bool = False) -> Iterator[None]:
    """Give the requests within the block the seeds of one sample, also those of tasks that are started in it."""
    token = _seeds.set(begin_sample(args, index, number, evaluation))
    try:
        yield
    finally:
        _seeds.reset(token)


def begin_sample(args: Namespace, index: int | None, number: int = 0, evaluation: bool = False) -> SampleSeeds:
    """Return the seeds of a sample: a hash of run seed, rollout, index, and how many times this sample started before.

    index   of the sample in the run, or in its evaluation set; None, or one that several share: they have different
            seeds in the order in which they begin
    number  of the sample among its siblings, whose indexes follow one another
    """
    sample = evaluation, None if index is None else int(index) - number, number
    rollout_id = None if getattr(args, SEEDED_BY_INDEX, False) else getattr(args, "rollout_id", None)
    with _lock:
        begun: dict[tuple[object, ...], int] = vars(args).setdefault(_BEGUN, {})
        num_before = begun.pop((rollout_id, *sample), 0)
        begun[rollout_id, *sample] = num_before + 1
        if len(begun) > _MOST_BEGUN:
            del begun[next(iter(begun))]
    run_seed = getattr(args, "rollout_seed", None)
    return SampleSeeds(run_seed, rollout_id, evaluation, sample[1], num_before, number=number)
