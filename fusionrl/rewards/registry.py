"""The built-in rewards of --rm-type by name, and weighted sums of them.

`--rm-type` is one name (`math`), a name whose grader sees the last box alone (`boxed_exact`), or a weighted sum of such
(`math:0.8+format:0.2`; a weight left out is 1).
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from fusionrl.config.aliases import value_hint
from fusionrl.rewards.code import CODE, CODE_ALL
from fusionrl.rewards.deepscaler import DEEPSCALER
from fusionrl.rewards.gpqa import GPQA
from fusionrl.rewards.grader import CodeGrade, Grader, Reward
from fusionrl.rewards.ifbench import IFBENCH
from fusionrl.rewards.ifeval import IFEVAL
from fusionrl.rewards.math_dapo_utils import DAPO
from fusionrl.rewards.math_utils import MATH, MATH_VERIFY, extract_answer
from fusionrl.rewards.text_match import EXACT, F1, FORMAT, LAST_NUMBER, RANDOM

RM_TYPES: dict[str, Grader] = {  # each has a row in docs/guides/rewards.md
    "exact": EXACT,
    "last_number": LAST_NUMBER,
    "f1": F1,
    "math": MATH,
    "math_verify": MATH_VERIFY,
    "math_verl": MATH,  # another name
    "dapo": DAPO,
    "deepscaler": DEEPSCALER,
    "gpqa": GPQA,
    "ifeval": IFEVAL,
    "ifbench": IFBENCH,
    "format": FORMAT,
    "code": CODE,
    "code_all": CODE_ALL,
    "random": RANDOM,
}
REMOTE = "remote_rm"  # a server's, by --rm-url: see `remote.py`
MODEL = "reward_model"  # an engine's, by --rm-model: see `reward_model.py`


class Part(NamedTuple):
    """One term of --rm-type."""

    name: str  # of RM_TYPES, or MODEL
    is_boxed: bool
    weight: float


class Graded(NamedTuple):
    """A reward; of a weighted sum its unweighted parts by name, else none; failed tests of programs by reason."""

    reward: Reward
    parts: dict[str, float]
    failures: dict[str, int]


@functools.cache
def parse_rm_type(rm_type: str) -> dict[str, Part]:
    """The terms of `--rm-type`, by name as written there (`boxed_math`).

    Raises ValueError for an unknown name, a name twice, or a weight that is not a finite number other than 0.
    """
    parts: dict[str, Part] = {}
    for term in re.split(r"\+(?=\s*[a-z_])", rm_type):
        written, colon, weight = (piece.strip() for piece in term.partition(":"))
        name = written.removeprefix("boxed_")
        if name not in RM_TYPES and written != MODEL:
            known = ", ".join(sorted(RM_TYPES))
            raise ValueError(
                f"{rm_type}: unknown reward {written!r}; known are {known}, each also with boxed_ before it,"
                f" and {MODEL}{value_hint('rm_type', written, [*RM_TYPES, MODEL])}"
            )
        if written == "boxed_deepscaler":
            raise ValueError(f"{rm_type}: deepscaler looks for </think> and then for a box itself; leave boxed_ out")
        if written in parts:
            raise ValueError(f"{rm_type}: {written} is given twice; add up its weights")
        parts[written] = Part(name, written != name, _weight(rm_type, weight) if colon else 1.0)
    return parts


def _weight(rm_type: str, weight: str) -> float:
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number == 0:
        raise ValueError(
            f"{rm_type}: the weight {weight!r} is not a number other than 0; write name:weight+name:weight"
        )
    return number


def _names(rm_type: str | None) -> set[str]:
    """The rewards that `rm_type` names; none where it is not a valid --rm-type, which other checks report."""
    if rm_type is None or rm_type == REMOTE:
        return set()
    try:
        return {part.name for part in parse_rm_type(rm_type).values()}
    except ValueError:
        return set()


def asks_model(rm_type: str | None) -> bool:
    """Return whether a reward model's engine scores the sample, alone or in a sum."""
    return MODEL in _names(rm_type)


def runs_programs(rm_type: str | None) -> bool:
    """Return whether a part of it runs programs in the sandbox."""
    return any(RM_TYPES[name].runs_programs for name in _names(rm_type) - {MODEL})


def gives_dict(rm_type: str) -> str | None:
    """The key to choose with --reward-key where `rm_type` alone gives a dict; None where it gives a number."""
    grader = RM_TYPES.get(next(iter(parse_rm_type(rm_type).values())).name)
    return grader.dict_key if grader is not None and _is_single(rm_type) else None


def _is_single(rm_type: str) -> bool:
    return len(parse_rm_type(rm_type)) == 1 and ":" not in rm_type


def grade(
    rm_type: str,
    response: str,
    label: object,
    metadata: Mapping[str, object] | None = None,
    model_score: float | None = None,
) -> Graded:
    """The reward of a response by `rm_type`; a single name without a weight gives what its grader returns.

    model_score  what the reward model said, where `rm_type` names one.

    Raises ValueError as `parse_rm_type` does, or as the grader does for a label or metadata it cannot use.
    """
    parts = parse_rm_type(rm_type)
    if MODEL in parts and model_score is None:
        raise ValueError(f"{rm_type}: {MODEL} needs async_rm(args, sample), not a grader")
    failures: Counter[str] = Counter()
    rewards: dict[str, Any] = {
        written: model_score if part.name == MODEL else _grade_part(part, response, label, metadata, failures)
        for written, part in parts.items()
    }
    if _is_single(rm_type):
        return Graded(next(iter(rewards.values())), {}, dict(failures))
    values = {
        written: float(reward[RM_TYPES[parts[written].name].dict_key] if isinstance(reward, dict) else reward)
        for written, reward in rewards.items()
    }
    total = sum(parts[written].weight * value for written, value in values.items())
    return Graded(total, values, dict(failures))


def _grade_part(
    part: Part, response: str, label: object, metadata: Mapping[str, object] | None, failures: Counter[str]
) -> Reward:
    grader = RM_TYPES[part.name]
    if part.is_boxed:
        answer = extract_answer(response)
        response = "" if answer is None else grader.box_form % answer
    reward = grader(response, label, metadata)
    if isinstance(reward, CodeGrade):
        failures.update(reward.failures)
        return reward.reward
    return reward
