"""Each event of a stream says which weights sampled which of its tokens, put into SGLang from outside.

SGLang's scheduler knows it, and tells it with the last event of an answer. Its front end gives the events before that
the version of the moment, which is too new for tokens that were on their way through the detokenizer at an update.
An engine that dies has no last event, and a function that streams stops before it.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Let schedulers of this process, and of those forked from it, tell it with each event. Idempotent."""
    from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    usual = _GenerationStreamAccumulator.accept
    if getattr(usual, "tells_versions", False):
        return

    def accept(self: Any, *, req: Any) -> None:
        before = len(self.weight_versions)
        usual(self, req=req)
        if req.stream and len(self.weight_versions) > before and self.weight_versions[-1] is None:
            self.weight_versions[-1] = compute_weight_version_spans(
                req.weight_version_events, self.current_weight_version, len(req.output_ids)
            )

    accept.tells_versions = True  # type: ignore[attr-defined]
    _GenerationStreamAccumulator.accept = accept
