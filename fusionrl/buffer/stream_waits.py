"""Whom the trainers of a stream wait for, in words: for a person who looks at a run that seems to stand still."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusionrl.buffer.stream_saved import StreamGroup
from fusionrl.pipeline.events import Action, Wait

_MOST_NAMED = 5  # groups


def describe_waits(actions: Iterable[Action], live: Mapping[int, StreamGroup]) -> str:
    """Return why the trainers wait and for which samples, and why the engines get nothing new; "" where nobody waits.

    live  ordinal → the samples of a group
    """
    why = {action.who: action for action in actions if isinstance(action, Wait)}
    trainers, engines = why.get("trainers"), why.get("engines")
    if trainers is None:
        return ""
    firsts = [live[ordinal].blank[0].index for ordinal in trainers.on if ordinal in live and live[ordinal].blank]
    named = ", ".join(map(str, firsts[:_MOST_NAMED])) + ", …" * (len(firsts) > _MOST_NAMED)
    plural = "s" * (len(firsts) != 1)
    groups = f" (waited for: {len(firsts)} group{plural}, of sample{plural} {named})" if firsts else ""
    return trainers.why + groups + (f"; engines get nothing new: {engines.why}" if engines is not None else "")
