"""The form of a response, whatever it says."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fusionrl.rewards.grader import Grader

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_reward(response: str, label: object, metadata: Mapping[str, object] | None = None) -> float:
    """1 where the whole response is `<think>…</think><answer>…</answer>`, each tag once and neither part empty.

    The opening `<think>` may be missing: many chat templates end the prompt with it. `format_regex` in the metadata
    (--rm-format-regex sets it for all samples) asks for that form instead; it must match the whole response, stripped.
    """
    regex = (metadata or {}).get("format_regex")
    if regex:
        return float(re.fullmatch(str(regex), response.strip(), re.DOTALL) is not None)
    text = response.strip()
    thinking, _, rest = text.removeprefix("<think>").partition("</think>")
    answer = rest.strip().removeprefix("<answer>").removesuffix("</answer>")
    is_wrapped = rest.strip() == f"<answer>{answer}</answer>"
    has_one_each = all(text.count(tag) <= 1 for tag in _TAGS) and "<think>" not in thinking + answer
    return float(is_wrapped and has_one_each and bool(thinking.strip()) and bool(answer.strip()))


FORMAT = Grader(format_reward, reads_metadata=True)
