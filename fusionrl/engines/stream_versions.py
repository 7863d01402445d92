"""Each event of a stream says which weights sampled which of its tokens, put into SGLang from outside.

SGLang's scheduler tells it with the last event of an answer, which an engine that dies does not send. The events before
have the version of the moment, too new for tokens that were on their way through the detokenizer at an update.

At a pause `in_place` of an engine that schedules ahead, as on a GPU, the token that is being sampled counts as one of
the new weights, in the last event too.
"""

import logging
from typing import Any

logger = logging.getLogger(__name__)


def register() -> None:
    """Let schedulers of this process, and of those forked from it, tell it with each event. Idempotent."""
    try:
        from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
        from sglang.srt.utils.weight_versions import compute_weight_version_spans
    except ImportError as error:  # another version of SGLang has them elsewhere
        logger.warning("the events of a stream tell the weight version of the moment, but for the last one: %s", error)
        return

    accept_without_versions = _GenerationStreamAccumulator.accept
    if getattr(accept_without_versions, "tells_versions", False):
        return

    def accept(self: Any, *, req: Any) -> None:
        before = len(self.weight_versions)
        accept_without_versions(self, req=req)
        if req.stream and len(self.weight_versions) > before and self.weight_versions[-1] is None:
            self.weight_versions[-1] = compute_weight_version_spans(
                req.weight_version_events, self.current_weight_version, len(req.output_ids)
            )

    accept.tells_versions = True  # type: ignore[attr-defined]
    _GenerationStreamAccumulator.accept = accept
