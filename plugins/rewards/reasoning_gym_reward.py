"""A reward by reasoning-gym's own verifiers, for rows written by tools/make_reasoning_data.py.

    --custom-rm-path plugins.rewards.reasoning_gym_reward.reward --metadata-key metadata

`reward` is the verifier's own score; `exact_reward` is 1 for a full score and 0 for less. Several verifiers give part
of the score to an answer that only contains the right one ("50" for "5"), and a policy soon learns to write such.

A row's metadata carries `source_dataset` (the name of the task), `entry` (what its verifier needs: `answer`, and mostly
`metadata`) and `config` (settings that differ from the task's own). The answer is looked for in the response, behind
`</think>` where there is one:

    <answer>…</answer>  the text in the last one
    no such tag         where the label is a number, the last number; else the whole text
"""

import math
import re
from typing import Any

from plugins.rewards.reasoning_gym_tasks import score

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# 1,234.5 and 1234.5 and -7 and .5. A minus sign belongs to the number unless what stands before it makes it a
# subtraction: 12-7 and (3)-7 end in 7, "is -7" and "=-7" in -7.
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


def find_answer(response: str, label: Any) -> str | None:
    """The answer in a response; None where there is none. Of the label only the kind counts: a number, or text."""
    text = response.rpartition("</think>")[2]
    if "<answer>" in text:
        answers = _TAG.findall(text)
        return answers[-1].strip() or None if answers else None  # a tag that is never closed was cut off
    if _NUMBER.fullmatch(str(label)):
        numbers = _NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else None
    return text.strip() or None


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """The verifier's score in [0, 1] of the answer in `sample.response`; 0.0 where there is no answer.

    Raises `ValueError` where the sample's metadata lacks `source_dataset` or `entry`, or belongs to another task.
    """
    metadata = sample.metadata or {}
    missing = [key for key in ("source_dataset", "entry") if key not in metadata]
    if missing:
        raise ValueError(
            f"the sample's metadata lacks {', '.join(missing)}; --metadata-key must name the column that "
            "tools/make_reasoning_data.py wrote"
        )
    entry = metadata["entry"]
    answer = find_answer(sample.response or "", entry.get("answer"))
    if answer is None:
        return 0.0
    value = score(metadata["source_dataset"], metadata.get("config") or {}, answer, entry)
    return value if math.isfinite(value) else 0.0


async def exact_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """1.0 where the verifier gives the full score, else 0.0; raises as `reward`."""
    return float(await reward(args, sample, **kwargs) >= 1.0)
