"""The reward on a few rows of the data: the gold label must score above an empty answer.

The label is tried in several common forms, as no flag says which one the reward looks for; --gold names another.
"""

import asyncio
from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

from fusionrl.checks.doctor.findings import Finding, fact, fault, warning
from fusionrl.config.config import Config
from fusionrl.data.sample import REWARD_LOST, Sample
from fusionrl.rewards.dispatch import RewardError, score_group
from fusionrl.rewards.registry import MODEL, REMOTE, parse_rm_type
from fusionrl.rewards.settings import RewardSettings

_CHECK = "reward"
GOLD = "{label}"
FORMS = (
    GOLD,
    "\\boxed{{label}}",
    "Answer: {label}",
    "<answer>{label}</answer>",
    "#### {label}",
    "<think>\nI see.\n</think>\n\\boxed{{label}}",
    "<think>\nI see.\n</think>\n<answer>{label}</answer>",
)
# Their label is not an answer (tests, instructions), or they do not read it.
_NO_GOLD = frozenset({"code", "code_all", "ifeval", "ifbench", "format", "random"})
# An answer has to have the whole label in it; elsewhere a label may be a solution of pages.
_WHOLE_LABEL = frozenset({"exact", "last_number", "dapo"})
_LIMIT_S = 20.0  # for one row; --reward-timeout-s where that is less


def gold_answers(label: object, gold: str | None) -> list[str]:
    """Return answers that say the label, `gold` being the one form that --gold gives; none of a label without text."""
    if isinstance(label, list | tuple) and label:
        label = label[0]  # several answers are right
    if not isinstance(label, str | int | float) or isinstance(label, bool) or not str(label).strip():
        return []
    return [form.replace(GOLD, str(label)) for form in ([gold] if gold is not None else FORMS)]


def written_answers(config: Config, rows: Sequence[Sample], gold: str | None) -> list[str]:
    """Return the answers to `rows` that a model has to be able to write; none where they are unknown."""
    reward = config.reward
    is_label = reward.custom_rm_path is None and reward.rm_type in _WHOLE_LABEL
    if gold is None and not is_label:
        return []
    return [answer for row in rows for answer in gold_answers(row.label, gold or GOLD)]


def why_unprobed(config: Config) -> str | None:
    """Return why no answer can be scored here; None: it can."""
    reward = config.reward
    if reward.custom_rm_path is not None:
        return None
    if not reward.rm_type:
        return "no --rm-type and no --custom-rm-path: rows, or your generate function, choose the reward"
    if reward.rm_type == REMOTE:
        return "--rm-type remote_rm asks a server"
    try:
        parts = parse_rm_type(reward.rm_type)
    except ValueError:
        return "--rm-type is wrong"  # told by the checks of flags
    names = [part.name for part in parts.values()]
    if MODEL in names:
        return "a reward model scores, and needs its engine"
    return f"--rm-type {reward.rm_type} reads no answer in the label" if set(names) <= _NO_GOLD else None


def reward_findings(config: Config, args: Namespace, rows: Sequence[Sample], gold: str | None) -> list[Finding]:
    """Score gold and empty answers of `rows`, by the function and in the processes that a run uses.

    args  as a hook gets them
    gold  --gold; None: the forms above are tried
    """
    reason = why_unprobed(config)
    if reason is not None:
        return [fact(_CHECK, f"not probed: {reason}")]
    settings = RewardSettings.of_args(args)
    settings = replace(settings, timeout_s=min(settings.timeout_s, _LIMIT_S), num_processes=1)
    problems: list[str] = []
    for row in rows:
        answers = gold_answers(row.label, gold)
        if not answers:
            continue
        samples = [deepcopy(row) for _ in (*answers, "")]
        for sample, answer in zip(samples, (*answers, ""), strict=True):
            sample.response, sample.status = answer, Sample.Status.COMPLETED
        problem = _problem(config, settings, samples, problems, gold)
        if problem is not None:
            return [problem]
    if not problems:
        return [fact(_CHECK, "not probed: no label is a text or a number")]
    return [fact(_CHECK, f"the gold label scores above an empty answer in {len(problems)} rows ({problems[0]})")]


def _problem(
    config: Config, settings: RewardSettings, samples: list[Sample], problems: list[str], gold: str | None
) -> Finding | None:
    """Score the answers to one row, the last of which is empty; None and a text more in `told` where all is well."""
    name = f"--custom-rm-path {config.reward.custom_rm_path}"
    name = name if config.reward.custom_rm_path else f"--rm-type {config.reward.rm_type}"
    label = samples[0].label
    try:
        rewards = asyncio.run(score_group(settings, samples))
    except (RewardError, ValueError) as error:
        return fault(_CHECK, f"{error}".splitlines()[0], "correct the function; the run would end with this")
    if any(sample.metadata.get(REWARD_LOST) for sample in samples):
        text = f"{name} gave no reward within {settings.timeout_s:g} s, or its process died, at the label {label!r:.60}"
        return fault(_CHECK, text, "call the function in a file of its own with such a sample, and see where it stands")
    key = config.reward.reward_key
    try:
        scores = [_number(reward, key) for reward in rewards]
    except (KeyError, TypeError, ValueError):
        return fault(_CHECK, f"{name} gives {rewards[0]!r:.120}", f"name a number of it: --reward-key (now {key})")
    best, empty = max(scores[:-1]), scores[-1]
    if best > empty:
        answer = samples[scores.index(best)].response
        problems.append(f"label {label!r:.40}: {best:g} for {answer!r:.60}, {empty:g} for an empty one")
        return None
    forms = "in each form that was tried" if gold is None else f"as --gold {gold}"
    text = f"{name}: the gold label {label!r:.60} scores {best:g} {forms}, an empty answer {empty:g}"
    if config.reward.custom_rm_path and gold is None:
        cure = "if it wants another form, give it: --gold 'FINAL: {label}'; else look why it does not see the label"
        return warning(_CHECK, text, cure)
    cure = "check --label-key and the form of the labels, and choose the reward that fits (docs/guides/rewards.md)"
    return fault(_CHECK, text, cure)


def _number(reward: float | Mapping[str, object], key: str | None) -> float:
    if isinstance(reward, Mapping):
        return float(reward[key or ""])  # type: ignore[arg-type]  # what it holds is the user's
    return float(reward)
