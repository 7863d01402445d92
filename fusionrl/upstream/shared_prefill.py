"""Requests with the same prompt compute it once, put into SGLang's schedulers from outside.

SGLang's cache knows the prompts of earlier batches. The samples of a group come at one moment and go into one batch,
where each computes the prompt anew. Here one of them goes ahead, and its siblings wait for the next batch: they find
the prompt in the cache, and compute its last token alone. For engines on a CPU, where a token costs the same in a batch
of any size. A forward pass more is worth it from `LEAST_TOKENS` on.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol, TypeVar

LEAST_TOKENS = 512
"""Tokens that siblings would compute anew, from which they wait: a pass over few tokens takes as long as they do."""


class Request(Protocol):
    """What is read of SGLang's `Req`."""

    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    extra_key: str | None


R = TypeVar("R", bound=Request)


def _prompt(request: Request) -> Hashable:
    return tuple(request.origin_input_ids), request.extra_key


def divide(queue: Sequence[R], ahead: Collection[Hashable]) -> tuple[list[R], list[R]]:
    """(requests for the next batch, siblings that wait for the one after it), in their order.

    ahead  prompts of the batch before: nobody waits for them again
    """
    now: list[R] = []
    later: list[R] = []
    prompts: set[Hashable] = set()
    for request in queue:
        prompt = _prompt(request)
        if prompt in prompts and prompt not in ahead and not request.output_ids:
            later.append(request)
        else:
            prompts.add(prompt)
            now.append(request)
    if sum(len(request.origin_input_ids) - 1 for request in later) < LEAST_TOKENS:
        return list(queue), []
    return now, later


def restore(queue: Sequence[R], held: Sequence[R], left: Sequence[R]) -> list[R]:
    """The queue after a batch was taken of it: those of `held` and `left` in their old order, then who is new."""
    known, waiting = {id(request) for request in queue}, {id(request) for request in (*held, *left)}
    return [one for one in queue if id(one) in waiting] + [one for one in left if id(one) not in known]


def register() -> None:
    """Let the schedulers of this process, and of those forked from it, hold siblings back. Idempotent."""
    from sglang.srt.managers.scheduler import Scheduler

    usual = Scheduler._get_new_batch_prefill_raw
    if getattr(usual, "holds_siblings", False):
        return

    def get_new_batch(self: Scheduler, prefill_delayer_single_pass: object, running_batch: Any) -> tuple[Any, Any]:
        ahead, self._prompts_ahead = getattr(self, "_prompts_ahead", ()), ()
        queue: list[Any] = self.waiting_queue
        held: list[Any] = []
        # With a full batch nobody is taken. A prompt that is computed in pieces goes on first. Without a cache nobody
        # finds what another has computed.
        can_hold = len(queue) > 1 and not running_batch.batch_is_full and self.chunked_req is None
        if can_hold and self.tree_cache.supports_prefix_sharing():
            now, held = divide(queue, ahead)
            if held:
                self.waiting_queue = now
        try:
            batch, running_batch = usual(self, prefill_delayer_single_pass, running_batch)
        finally:
            if held:
                self.waiting_queue = restore(queue, held, self.waiting_queue)
        if held and batch is not None:
            self._prompts_ahead = {_prompt(request) for request in batch.reqs}
        return batch, running_batch

    get_new_batch.holds_siblings = True  # type: ignore[attr-defined]
    Scheduler._get_new_batch_prefill_raw = get_new_batch
