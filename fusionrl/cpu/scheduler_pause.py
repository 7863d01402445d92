"""A paused scheduler sleeps on a CPU, put into SGLang from outside.

While generation is paused, SGLang's scheduler asks for messages again and again, without a rest. On a GPU's host that
costs a core. On a CPU the trainers need that core: they send the weights for which the engines are paused.
"""

from __future__ import annotations


def register() -> None:
    """Let schedulers of this process, and of those forked from it, sleep while they are paused. Idempotent.

    They sleep as they do when they are idle, with --sleep-on-idle: until there is a message.
    """
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler._record_scheduler_state_for_paused_engine
    if getattr(original, "sleeps", False):
        return

    def record_and_sleep(self: Scheduler) -> None:
        original(self)
        self.maybe_sleep_on_idle()

    record_and_sleep.sleeps = True  # type: ignore[attr-defined]
    Scheduler._record_scheduler_state_for_paused_engine = record_and_sleep
