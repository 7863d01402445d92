"""The rewards of --rm-type: what one is, those that are built in, weighted sums of them, and the check of labels.

`--rm-type` is one name (`math`), a name whose reward sees the last box alone (`boxed_exact`), or a weighted sum of such
(`math:0.8+format:0.2`; a weight left out is 1). To add a reward, define a `Reward` in a file of this room, name it in
`RM_TYPES`, and give it a row in docs/guides/rewards.md.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fusionrl.base.wording import install_hint
from fusionrl.config.run_parts import evaluates_by_default, has_own_rollout, has_own_source
from fusionrl.data.findings import LabelProblem

if TYPE_CHECKING:
    from fusionrl.config.config import Config
    from fusionrl.config.eval_sets import EvalSet

RM_TYPES = {  # name: its file in this room, and the `Reward` in it
    "exact": "text_match:EXACT",
    "last_number": "numbers:LAST_NUMBER",
    "f1": "text_match:F1",
    "math": "math_utils:MATH",
    "math_verify": "math_utils:MATH_VERIFY",
    "math_verl": "math_utils:MATH",  # another name
    "dapo": "math_dapo_utils:DAPO",
    "deepscaler": "math_utils:DEEPSCALER",
    "gpqa": "gpqa:GPQA",
    "ifeval": "instructions:IFEVAL",
    "ifbench": "instructions:IFBENCH",
    "format": "text_match:FORMAT",
    "code": "code:CODE",
    "code_all": "code:CODE_ALL",
    "random": "text_match:RANDOM",
}
REMOTE = "remote_rm"  # a server's, by --rm-url
REMOTE_PATH = "fusionrl.rewards.reward_model.remote_rm"  # the function that asks it
MODEL = "reward_model"  # an engine's, by --rm-model
# Reasons of a program's failed tests; docs/guides/rewards.md explains each.
REASONS = ("no_program", "wrong", "error", "no_answer", "time", "memory", "signal", "output", "object", "sandbox")
LABEL_BUDGET_S = 5.0
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a character of the answer
RewardValue = float | dict[str, Any]


class CodeGrade(NamedTuple):
    """A reward in [0, 1] of a program, and how many tests failed for which of `REASONS`."""

    reward: float
    failures: dict[str, int]


@dataclass(frozen=True)
class Reward:
    """A built-in reward.

    grade             grade(response, label), or grade(response, label, metadata) with `reads_metadata`
    check             as `grade` without the response: raises ValueError where `grade` would, before a run starts, and
                      turns errors of other kinds (re.error, OverflowError) into it; None: any label will do
    label             the answer itself, a solution that has the answer in it, tests that the response has to pass (of a
                      program, or a pattern), or not read at all
    reads_metadata    of the sample
    box_form          the form in which it gets the answer of a box, with boxed_ before its name; None: it looks for a
                      box itself
    package           module that it needs
    cure              how to get that, where pip does not have it
    dict_key          it returns a dict, of which a weighted sum takes this number
    is_slow_to_check  reading one label takes up to milliseconds
    runs_programs     of the response, in the sandbox
    """

    grade: Callable[..., RewardValue | CodeGrade]
    check: Callable[..., object] | None = None
    label: Literal["answer", "solution", "tests", "unread"] = "solution"
    reads_metadata: bool = False
    box_form: str | None = "%s"
    package: str | None = None
    cure: str | None = None
    dict_key: str | None = None
    is_slow_to_check: bool = False
    runs_programs: bool = False

    def __call__(
        self, response: str, label: object, metadata: Mapping[str, object] | None = None
    ) -> RewardValue | CodeGrade:
        """Return the reward of a response. Raises ValueError if it cannot use the label or the metadata."""
        return self.grade(response, label, metadata or {}) if self.reads_metadata else self.grade(response, label)

    def missing(self) -> str | None:
        """Return what is not installed, with the cure; None: all is there."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        pip = self.package.replace("_", "-")
        if self.cure is not None:
            return f"{self.package}.py is not found; {self.cure}"
        return f"the package {pip} is not installed; {install_hint(pip)}"


@functools.cache
def reward_of(name: str) -> Reward:
    """Return the reward of a name in `RM_TYPES`; its file is imported here."""
    file, _, variable = RM_TYPES[name].partition(":")
    reward = getattr(importlib.import_module(f"fusionrl.rewards.{file}"), variable)
    assert isinstance(reward, Reward)
    return reward


class Part(NamedTuple):
    """One term of --rm-type."""

    name: str  # of RM_TYPES, or MODEL
    is_boxed: bool
    weight: float


class Graded(NamedTuple):
    """A reward; of a weighted sum its unweighted parts by name, else none; failed tests of programs by reason."""

    reward: RewardValue
    parts: dict[str, float]
    failures: dict[str, int]


def extract_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` (or `\fbox{…}`); None if there is none or its brace is not closed."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.start()].strip()
    return None


@functools.cache
def parse_rm_type(rm_type: str) -> dict[str, Part]:
    """The terms of `--rm-type`, by name as written there (`boxed_math`).

    Raises ValueError for an unknown name, a name twice, or a weight that is not a finite number other than 0.
    """
    parts: dict[str, Part] = {}
    for term in re.split(r"\+(?=\s*[a-z_])", rm_type):
        written, colon, weight = map(str.strip, term.partition(":"))
        name = written.removeprefix("boxed_")
        if name not in RM_TYPES and written != MODEL:
            from fusionrl.config.aliases import value_hint  # reads its tables

            known = ", ".join(sorted(RM_TYPES))
            raise ValueError(
                f"{rm_type}: unknown reward {written!r}; known are {known}, each also with boxed_ before it,"
                f" and {MODEL}{value_hint('rm_type', written, [*RM_TYPES, MODEL])}"
            )
        if written != name and reward_of(name).box_form is None:
            raise ValueError(f"{rm_type}: {name} looks for </think> and then for a box itself; leave boxed_ out")
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


def names_of(rm_type: str | None) -> set[str]:
    """The rewards that `rm_type` names; none where it is not a valid --rm-type, which other checks report."""
    if rm_type is None or rm_type == REMOTE:
        return set()
    try:
        return {part.name for part in parse_rm_type(rm_type).values()}
    except ValueError:
        return set()


def runs_programs(rm_type: str | None) -> bool:
    """Return whether a part of it runs programs in the sandbox."""
    return any(reward_of(name).runs_programs for name in names_of(rm_type) - {MODEL})


def rm_type_errors(
    flag: str, rm_type: str | None, rm_model: str | None, reward_key: str | None, key_flag: str
) -> list[str]:
    """List what is wrong with a built-in reward: its name, what it needs, a dict without `reward_key`."""
    if rm_type is None or rm_type == REMOTE:
        return []
    try:
        parts = parse_rm_type(rm_type)
    except ValueError as error:
        return [f"{flag} {error}"]
    errors: dict[str, None] = {}  # each once
    for part in parts.values():
        if part.name == MODEL:
            if rm_model is None:
                errors[f"{flag} {rm_type} needs --rm-model: the Hugging Face folder of the reward model"] = None
            continue
        reward = reward_of(part.name)
        if problem := reward.missing():
            errors[f"{flag} {rm_type}: {problem}"] = None
        if reward.dict_key is not None and reward_key is None and _is_single(rm_type):
            errors[f"{flag} {rm_type} gives a dict; choose a number of it, {key_flag} {reward.dict_key}"] = None
    return list(errors)


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

    Raises ValueError as `parse_rm_type` does, or as the reward does for a label or metadata it cannot use.
    """
    parts = parse_rm_type(rm_type)
    failures: Counter[str] = Counter()
    values: dict[str, Any] = {}
    for written, part in parts.items():
        if part.name == MODEL:
            if model_score is None:
                raise ValueError(f"{rm_type}: {MODEL} needs async_rm(args, sample), not a grader")
            values[written] = model_score
            continue
        reward, text = reward_of(part.name), response
        if part.is_boxed:
            answer = extract_answer(response)
            text = "" if answer is None or reward.box_form is None else reward.box_form % answer
        value = reward(text, label, metadata)
        if isinstance(value, CodeGrade):
            failures.update(value.failures)
            value = value.reward
        values[written] = value
    if _is_single(rm_type):
        return Graded(next(iter(values.values())), {}, dict(failures))
    for written, value in values.items():
        values[written] = float(
            value[reward_of(parts[written].name).dict_key or ""] if isinstance(value, dict) else value
        )
    return Graded(sum(parts[written].weight * value for written, value in values.items()), values, dict(failures))


@dataclass
class LabelCheck:
    """Asks the reward of each row whether it can grade with the row's label and metadata, before a run starts.

    rm_type     --rm-type; a row's metadata may name another
    overrides   entries of the metadata that replace those of each row
    is_warning  a user's function may still give the samples other labels
    budget_s    seconds for labels that take long to read, counted down; what comes after them is not read
    """

    rm_type: str | None
    overrides: Mapping[str, object] | None = None
    is_warning: bool = False
    budget_s: float = LABEL_BUDGET_S

    @classmethod
    def of_run(
        cls, config: Config, eval_set: EvalSet | None = None, budget_s: float = LABEL_BUDGET_S
    ) -> LabelCheck | None:
        """Return the check of --prompt-data, or of an evaluation set; None: no built-in reward grades the labels.

        A user's generate function, or a sample hook, may give the samples other labels: then problems are warnings.
        """
        reward, rollout = config.reward, config.rollout
        generate_path, rm_type, rm_path = rollout.custom_generate_function_path, reward.rm_type, reward.custom_rm_path
        is_own = has_own_source(config) or has_own_rollout(config) or bool(config.run.load_debug_rollout_data)
        if eval_set is not None:
            generate_path = eval_set.custom_generate_function_path
            rm_type, rm_path = eval_set.rm_type, eval_set.custom_rm_path
            is_own = not evaluates_by_default(config)
        if is_own or rm_path is not None or config.run.mode == "sft":
            return None
        is_warning = generate_path is not None or bool(rollout.rollout_sample_hook_path)
        return cls(rm_type, None if eval_set is None else eval_set.metadata_overrides, is_warning, budget_s)

    def __call__(self, label: object, metadata: Mapping[str, object]) -> LabelProblem | None:
        """Return the problem of a row's label or metadata; None for none."""
        metadata = {**metadata, **self.overrides} if self.overrides else metadata
        row_rm_type = metadata.get("rm_type")
        rm_type = row_rm_type or self.rm_type
        if not rm_type or rm_type == REMOTE:
            return None
        name = f"rm_type {row_rm_type} of the metadata" if row_rm_type else f"--rm-type {rm_type}"
        try:
            parts = parse_rm_type(str(rm_type))
        except ValueError as error:  # a wrong --rm-type is reported elsewhere
            return LabelProblem(name, str(error), False, self.is_warning) if row_rm_type else None
        for part in parts.values():
            if part.name == MODEL:
                continue
            reward = reward_of(part.name)
            if reward.check is None or (reward.is_slow_to_check and self.budget_s <= 0):
                continue
            since = time.monotonic()
            try:
                reward.check(label, metadata) if reward.reads_metadata else reward.check(label)
            except ValueError as error:
                problem = str(error).partition("--rm-type ")[2].partition(": ")[2] or str(error)
                return LabelProblem(name, problem, reward.label != "unread", self.is_warning)
            finally:
                if reward.is_slow_to_check:
                    self.budget_s -= time.monotonic() - since
        return None
