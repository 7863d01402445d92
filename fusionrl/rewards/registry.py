"""The built-in rewards of --rm-type: each a plain function that a process can be sent, with its meaning in the docs.

`--rm-type` is one name (`math`), a name whose grader sees the last box alone (`boxed_exact`), or a weighted sum of such
(`math:0.8+format:0.2`; a weight left out is 1).
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fusionrl.config.aliases import value_hint
from fusionrl.rewards import math_utils, text_match
from fusionrl.rewards.code import CodeGrade, code, code_all, grade_all, grade_share
from fusionrl.rewards.deepscaler import get_deepscaler_rule_based_reward
from fusionrl.rewards.format import format_reward
from fusionrl.rewards.gpqa import compute_gpqa_reward
from fusionrl.rewards.ifbench import LIBRARY, compute_ifbench_reward
from fusionrl.rewards.ifeval import ifeval
from fusionrl.rewards.math_dapo_utils import compute_score

Reward = float | dict[str, Any]

# To add one: a function in this room, a line here and in the tables below that fit it, a test, and a row in
# docs/guides/rewards.md.
RM_TYPES: dict[str, Callable[..., Reward]] = {  # grade(response, label)
    "exact": text_match.exact,
    "last_number": text_match.last_number,
    "f1": text_match.f1,
    "math": math_utils.math_verl,
    "math_verify": math_utils.math_reward,
    "math_verl": math_utils.math_verl,  # another name of math
    "dapo": compute_score,
    "deepscaler": get_deepscaler_rule_based_reward,
    "gpqa": compute_gpqa_reward,
    "ifeval": ifeval,
    "ifbench": compute_ifbench_reward,
    "format": format_reward,
    "code": code,
    "code_all": code_all,
    "random": text_match.random_reward,
}
REMOTE = "remote_rm"  # a server's, by --rm-url: see `remote.py`
MODEL = "reward_model"  # an engine's, by --rm-model: see `reward_model.py`
# These run programs in the sandbox, and also count the failed tests by reason.
EXPLAINED: dict[str, Callable[[str, Any], CodeGrade]] = {"code": grade_share, "code_all": grade_all}
NEED_METADATA = frozenset({"gpqa", "ifeval", "ifbench", "format"})  # grade(response, label, metadata)
# With boxed_ these get the answer in the form that they look for, not bare.
_BOX_FORMS = dict.fromkeys(("math", "math_verify", "math_verl"), r"\boxed{%s}") | {"dapo": "Answer: %s"}
READ_BOXES = frozenset(_BOX_FORMS)
PACKAGES = dict.fromkeys(("math", "math_verify", "math_verl", "deepscaler"), "math_verify") | {
    "ifeval": "langdetect",
    "ifbench": LIBRARY,
}
DICT_KEY = {"dapo": "score"}  # graders that return a dict, and the number of it that a sum takes


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

    Raises:
        ValueError: an unknown name, a name twice, or a weight that is not a finite number other than 0.
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


def asks_model(rm_type: str | None) -> bool:
    """Return whether a reward model's engine scores the sample, alone or in a sum; False for a name of no reward."""
    try:
        return rm_type is not None and rm_type != REMOTE and MODEL in parse_rm_type(rm_type)
    except ValueError:
        return False  # whoever grades by it says what is wrong


def gives_dict(rm_type: str) -> str | None:
    """The key to choose with --reward-key where `rm_type` alone gives a dict; None where it gives a number."""
    parts = parse_rm_type(rm_type)
    return next((DICT_KEY.get(part.name) for part in parts.values()), None) if _is_single(rm_type, parts) else None


def _is_single(rm_type: str, parts: dict[str, Part]) -> bool:
    return len(parts) == 1 and ":" not in rm_type


def grade(
    rm_type: str,
    response: str,
    label: object,
    metadata: Mapping[str, object] | None = None,
    model_score: float | None = None,
) -> Graded:
    """The reward of a response by `rm_type`; a single name without a weight gives what its grader returns.

    model_score  what the reward model said, where `rm_type` names one.

    Raises:
        ValueError: as `parse_rm_type`, or as the grader does for a label or metadata it cannot use.
    """
    parts = parse_rm_type(rm_type)
    if MODEL in parts and model_score is None:
        raise ValueError(f"{rm_type}: {MODEL} needs async_rm(args, sample), not a grader")
    failures: Counter[str] = Counter()
    rewards: dict[str, Any] = {
        written: model_score if part.name == MODEL else _grade_part(part, response, label, metadata, failures)
        for written, part in parts.items()
    }
    if _is_single(rm_type, parts):
        return Graded(next(iter(rewards.values())), {}, dict(failures))
    values = {
        written: float(reward[DICT_KEY[parts[written].name]] if isinstance(reward, dict) else reward)
        for written, reward in rewards.items()
    }
    total = sum(parts[written].weight * value for written, value in values.items())
    return Graded(total, values, dict(failures))


def runs_programs(rm_type: str | None) -> bool:
    """Return whether a part of it runs programs in the sandbox; False for a name of no reward."""
    try:
        return (
            rm_type is not None
            and rm_type != REMOTE
            and any(p.name in EXPLAINED for p in parse_rm_type(rm_type).values())
        )
    except ValueError:
        return False  # whoever grades by it says what is wrong


def _grade_part(
    part: Part, response: str, label: object, metadata: Mapping[str, object] | None, failures: Counter[str]
) -> Reward:
    if part.is_boxed:
        answer = math_utils.extract_answer(response)
        if answer is None:
            response = ""
        else:
            response = _BOX_FORMS.get(part.name, "%s") % answer
    if part.name in EXPLAINED:
        graded = EXPLAINED[part.name](response, label)
        failures.update(graded.failures)
        return graded.reward
    function = RM_TYPES[part.name]
    return function(response, label, metadata) if part.name in NEED_METADATA else function(response, label)
