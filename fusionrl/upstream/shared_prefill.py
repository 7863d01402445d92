"""Requests with the same prompt compute it once, put into SGLang's schedulers from outside.

SGLang's cache knows the prompts of earlier batches. The samples of a group come at one moment and go into one batch,
where each computes the prompt anew. Here one of them goes ahead, and its siblings wait for the next batch: they find
the prompt in the cache, and compute its last token alone. For engines on a CPU, where a token costs the same in a batch
of any size. A forward pass more is worth it from `LEAST_TOKENS` on.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Protocol, TypeVar

LEAST_TOKENS = 512
"""Tokens that siblings would compute anew, from which they wait: a pass over few tokens takes as long as they do."""


class Request(Protocol):
    """What is read of SGLang's `Req`."""

    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    extra_key: str | None


R = TypeVar("R", bound=Request)


def divide(queue: Sequence[R], ahead: Collection[Hashable]) -> tuple[list[R], list[R], set[Hashable]]:
    """(requests for the next batch, siblings that wait for the one after it, prompts of the former), in their order.

    ahead  prompts that went ahead the last time: nobody waits for them twice
    """
    now: list[R] = []
    later: list[R] = []
    prompts: set[Hashable] = set()
    for request in queue:
        prompt = (tuple(request.origin_input_ids), request.extra_key)
        if prompt in prompts and prompt not in ahead and not request.output_ids:
            later.append(request)
        else:
            prompts.add(prompt)
            now.append(request)
    if sum(len(request.origin_input_ids) - 1 for request in later) < LEAST_TOKENS:
        return list(queue), [], prompts
    return now, later, prompts


def register() -> None:
    """Let the schedulers of this process, and of those forked from it, hold siblings back. Idempotent."""
    from sglang.srt.managers.scheduler import Scheduler

    usual = Scheduler._get_new_batch_prefill_raw
    if getattr(usual, "holds_siblings", False):
        return

    def get_new_batch(self: Scheduler, *args: object, **kwargs: object) -> object:
        # A prompt that is computed in pieces goes on first; without a cache nobody finds what another computed.
        if self.chunked_req is not None or len(self.waiting_queue) < 2 or not self.tree_cache.supports_prefix_sharing():
            return usual(self, *args, **kwargs)
        now, later, prompts = divide(self.waiting_queue, getattr(self, "_prompts_ahead", ()))
        self._prompts_ahead = prompts
        if later:
            self.waiting_queue = now
        try:
            return usual(self, *args, **kwargs)
        finally:
            if later:
                self.waiting_queue = [*self.waiting_queue, *later]

    get_new_batch.holds_siblings = True  # type: ignore[attr-defined]
    Scheduler._get_new_batch_prefill_raw = get_new_batch
