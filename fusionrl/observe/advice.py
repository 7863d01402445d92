"""Warnings about a rollout that teaches nothing or little: plain functions over facts, and when to say them again.

The Buffer gathers `RolloutFacts`; the driver asks `Watches` after each rollout and after each step, and prints the
answers. Pure: nothing here knows flags beyond their names, nor a file.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from fusionrl.observe.formats import ending, shorten, visible

REWARD_LOST_KEY = 'metadata["reward_lost"]'
TRUNCATED_SHARE = 0.5  # more truncated answers than this are warned about
NO_ROOM_SHARE = 0.1  # the same of samples without room for a second turn: one in a thousand is nothing to act on
_EXAMPLE_PROMPT, _EXAMPLE_ANSWER = 120, 160  # characters


@dataclass(frozen=True)
class Glimpse:
    """One sample for people. Texts are as the sample has them, cut to some hundreds of characters."""

    index: int | None
    prompt: str  # its end
    response: str
    label: str | None
    reward: float
    response_length: int  # tokens
    status: str


@dataclass(frozen=True)
class RolloutFacts:
    """Counts over one rollout; `num_…` without another noun are samples.

    num_equal_groups    groups whose raw rewards are all equal; a group of one is
    num_same_text       groups of several samples whose answers are the same text
    num_trained         samples with at least one token that is trained on
    num_truncated       of these, num_at_response_limit and num_at_context_limit are as long as a limit allows
    num_no_second_turn  samples of several turns that had no room left after the first one
    teaches_nothing     the advantages are all 0, whatever the trainers add to them
    lowest, highest     raw reward
    example             a sample to show; None for a rollout without samples
    num_changed, changed_by  samples that were sampled with parameters (by name) that change the policy's distribution
    num_timeouts, num_crashes, num_errors  samples whose reward function took too long, ended its process, or failed
    """

    num_samples: int
    num_groups: int
    num_equal_groups: int
    num_same_text: int
    num_trained: int
    num_failed: int
    num_truncated: int
    num_at_response_limit: int
    num_at_context_limit: int
    num_without_label: int
    num_no_second_turn: int
    teaches_nothing: bool
    lowest: float
    highest: float
    example: Glimpse | None = None
    num_timeouts: int = 0
    num_crashes: int = 0
    num_changed: int = 0
    changed_by: tuple[str, ...] = ()
    num_errors: int = 0

    @property
    def is_all_equal(self) -> bool:
        """Return whether no group prefers one answer to another."""
        return self.num_equal_groups == self.num_groups


@dataclass(frozen=True)
class AdviceSettings:
    """The values of flags that a warning names."""

    run: str
    estimator: str = "grpo"
    compares_siblings: bool = True  # it measures an answer against the others to its prompt
    label_key: str | None = None
    max_response_len: int | None = None
    max_context_len: int | None = None
    temperature: float = 1.0
    ignores_eos: bool = False
    other_terms: tuple[str, ...] = ()  # flags whose loss terms train even where all advantages are 0
    reward_timeout_s: float = 60.0
    failure_value: float | None = None  # --reward-failure-value
    threshold: float | None = None  # --reject-sampling-threshold, in that mode


class Watches:
    """Warnings of a run, step by step; the same kind again only after QUIET_STEPS steps."""

    QUIET_STEPS = 20

    def __init__(self, settings: AdviceSettings) -> None:
        self.settings = settings
        self._told_at: dict[str, int] = {}
        self._facts: tuple[int, RolloutFacts] | None = None

    def after_rollout(self, step: int, facts: RolloutFacts) -> list[str]:
        """Warnings about the rollout of `step`, before it is trained on."""
        self._facts = (step, facts)
        warnings = {
            "equal": equal_rewards(facts, self.settings, step) if facts.teaches_nothing else None,
            "turns": no_second_turn(facts, self.settings, step),
            "changed": changed_distribution(facts),
        }
        texts = self._due(step, warnings)
        if self._told_at.get("equal") == step:  # which names lost rewards as the first cause
            self._told_at["lost"] = step
        texts += self._due(step, {"lost": lost_rewards(facts, self.settings)})
        if texts and facts.num_truncated / max(facts.num_samples, 1) > TRUNCATED_SHARE:  # these name the cause
            self._told_at["truncated"] = step
        return texts + self._due(step, {"truncated": truncated(facts, self.settings, step)})

    @property
    def changed_by(self) -> tuple[str, ...]:
        """Sampling parameters that changed the distribution of the last rollout."""
        return self._facts[1].changed_by if self._facts is not None else ()

    def after_step(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Warnings about all that was measured in `step`."""
        warnings = {f"eval {name}": text for name, text in truncated_evaluations(metrics).items()}
        warnings["eval lost"] = lost_in_evaluation(metrics)
        warnings["accepted"] = nothing_accepted(metrics, self.settings, step)
        # A user's own advantages or loss may make something of equal rewards; a gradient of exactly 0 says they do not.
        if self._facts is not None and self._facts[0] == step and metrics.get("train/grad_norm") == 0.0:
            facts = self._facts[1]
            warnings["equal"] = equal_rewards(facts, self.settings, step) if facts.is_all_equal else None
        return self._due(step, warnings)

    def _due(self, step: int, warnings: Mapping[str, str | None]) -> list[str]:
        texts = []
        for kind, text in warnings.items():
            if text is not None and step - self._told_at.get(kind, -self.QUIET_STEPS) >= self.QUIET_STEPS:
                self._told_at[kind] = step
                texts.append(text)
        return texts


def equal_rewards(facts: RolloutFacts, settings: AdviceSettings, step: int) -> str:
    """Explain a rollout whose advantages are all 0: likely causes, a sample, where to look."""
    if not facts.num_trained:
        reason = f"no token of its {facts.num_samples} samples is trained on"
    elif facts.is_all_equal:
        many = f"all {facts.num_groups} groups have" if facts.num_groups > 1 else "its only group has"
        same = f" ({facts.lowest:g} throughout)" if facts.lowest == facts.highest else ""
        reason = f"{many} equal rewards{same}, so every advantage is 0"
    else:
        reason = "every advantage is 0"
    also = f" beyond {' and '.join(settings.other_terms)}" if settings.other_terms else ""
    lines = [f"this rollout teaches nothing{also}: {reason}"]
    lines += [f"  likely: {cause}" for cause in likely_causes(facts, settings)]
    if facts.example is not None:
        lines.append(f"  {describe(facts.example)}")
    return "\n".join([*lines, f"  look: {show_command(settings.run, step)}{' --all-equal' * facts.is_all_equal}"])


def likely_causes(facts: RolloutFacts, settings: AdviceSettings) -> list[str]:
    """Return the reasons why rewards may be equal, the surest first."""
    causes, count = [], facts.num_samples
    if lost := lost_rewards(facts, settings):
        causes.append(lost)
        if facts.num_timeouts + facts.num_crashes + facts.num_errors == count:
            return causes
    if facts.num_failed == count:
        return ["every sample failed or was aborted: see logs/buffer.*.log"]
    if not facts.num_trained:
        return ["samples were removed (remove_sample), failed, or have a loss mask of 0 throughout"]
    if facts.num_groups == count and settings.compares_siblings:
        causes.append(
            f"--n-samples-per-prompt 1: --advantage-estimator {settings.estimator} compares the answers to one prompt"
        )
    if facts.num_truncated / count >= TRUNCATED_SHARE:
        causes.append(f"{facts.num_truncated / count:.0%} of the answers were cut off {_limit(facts, settings)}")
    if facts.num_without_label:
        key = settings.label_key
        cure = "give --label-key, if the reward needs one" if key is None else f"see column {key!r} (--label-key)"
        causes.append(f"{facts.num_without_label} of {count} samples have no label: {cure}")
    if facts.num_same_text and facts.num_same_text >= facts.num_groups / 2:
        causes.append(
            f"the answers to one prompt are the same text in {facts.num_same_text} of {facts.num_groups} groups"
            f" (--rollout-temperature {settings.temperature:g})"
        )
    if facts.lowest < facts.highest:
        cure = "more --n-samples-per-prompt, or a filter (--dynamic-sampling-filter-path)"
        causes.append(f"each prompt is always answered right or always wrong: take medium ones, {cure}")
    elif facts.highest > 0:
        causes.append(f"every answer gets {facts.highest:g}: the prompts are too easy, or the reward is a constant")
    else:
        why = "it may not find the answer in the form that the model gives, or the prompts are too hard"
        causes.append(f"the reward is always {facts.highest:g}: {why}")
    return causes


def changed_distribution(facts: RolloutFacts) -> str | None:
    """Warn of samples that do not come from the policy's distribution; None for none."""
    if not facts.num_changed:
        return None
    return (
        f"{facts.num_changed} of {facts.num_samples} samples were sampled with {', '.join(facts.changed_by)}, so their"
        " tokens do not come from the distribution that is trained, and training on them is biased; leave these"
        " sampling parameters out, or set the tokens' loss_mask to 0"
    )


def lost_rewards(facts: RolloutFacts, settings: AdviceSettings) -> str | None:
    """Warn of samples whose reward function hung, took its process down or raised; None for none."""
    counts = {
        f"got no reward within --reward-timeout-s {settings.reward_timeout_s:g}": facts.num_timeouts,
        "ended the process of the reward function": facts.num_crashes,
        "made the reward function raise, or got no number": facts.num_errors,
    }
    parts = [f"{count} of {facts.num_samples} samples {fate}" for fate, count in counts.items() if count]
    if not parts:
        return None
    value = settings.failure_value
    then = "these are not trained on" if value is None else f"these are trained with --reward-failure-value {value:g}"
    return f"{' and '.join(parts)}; {then}: see logs/buffer.*.log, and {REWARD_LOST_KEY} of the samples"


def lost_in_evaluation(metrics: Mapping[str, float]) -> str | None:
    """Return the text about answers of evaluations that were never scored; None for none."""
    lost = sum(metrics.get(f"eval/reward_{reason}", 0) for reason in ("timeout", "crash", "error"))
    if not lost:
        return None
    why = "the reward function took longer than --reward-timeout-s, raised, or its process died"
    return f"{lost:.0f} answers of the evaluation got no reward ({why}) and count as 0: see logs/buffer.*.log"


def truncated(facts: RolloutFacts, settings: AdviceSettings, step: int) -> str | None:
    """Warn if most answers were cut off; None if they were not, or were meant to be."""
    share = facts.num_truncated / max(facts.num_samples, 1)
    if share <= TRUNCATED_SHARE or settings.ignores_eos:
        return None
    return (
        f"{share:.0%} of the answers ({facts.num_truncated} of {facts.num_samples}) were cut off"
        f" {_limit(facts, settings)} before they ended; a reward mostly finds no answer in these. Raise the limit, or"
        f" ask for shorter answers\n  look: {show_command(settings.run, step)}"
    )


def no_second_turn(facts: RolloutFacts, settings: AdviceSettings, step: int) -> str | None:
    """Warn if samples of several turns ended after the first for lack of room; None otherwise."""
    share = facts.num_no_second_turn / max(facts.num_samples, 1)
    if share <= NO_ROOM_SHARE:
        return None
    limit = f"--rollout-max-context-len {settings.max_context_len} bounds the prompt and all turns"
    if settings.max_context_len is None:
        limit = f"--rollout-max-response-len {settings.max_response_len} bounds all turns, with tools' tokens,"
        limit += " where --rollout-max-context-len is not given"
    return (
        f"{share:.0%} of the samples ({facts.num_no_second_turn} of {facts.num_samples}) had no room for a second turn:"
        f" {limit}. Raise it, or bound a turn with generate_turn(…, longest=…)\n  look:"
        f" {show_command(settings.run, step)}"
    )


def truncated_evaluations(metrics: Mapping[str, float]) -> dict[str, str | None]:
    """Evaluation set → what to say where most of its answers were cut off."""
    warnings: dict[str, str | None] = {}
    for key, share in metrics.items():
        prefix, _, name = key.removesuffix("/truncated_ratio").partition("/")
        if prefix == "eval" and key.endswith("/truncated_ratio") and share > TRUNCATED_SHARE:
            warnings[name] = (
                f"evaluation set {name}: {share:.0%} of the answers were cut off at --eval-max-response-len (by default"
                " --rollout-max-response-len) before they ended; its accuracy says little"
            )
    return warnings


def nothing_accepted(metrics: Mapping[str, float], settings: AdviceSettings, step: int) -> str | None:
    """--mode reject-sampling: what to say where not one sample of a rollout was accepted."""
    if settings.threshold is None or metrics.get("rollout/accepted") != 0:
        return None
    names = ("unfinished", "unsampled", "below_threshold", "duplicates")
    counts = ", ".join(f"{metrics.get(f'rollout/{name}', 0):.0f} {name.replace('_', ' ')}" for name in names)
    return (
        f"no sample of this rollout was accepted: {counts} (--reject-sampling-threshold {settings.threshold:g})"
        f"\n  look: {show_command(settings.run, step)} --best"
    )


def describe(sample: Glimpse) -> str:
    """One sample on one line, safe for a terminal."""
    prompt, answer = visible(ending(sample.prompt, _EXAMPLE_PROMPT)), visible(shorten(sample.response, _EXAMPLE_ANSWER))
    label = "None" if sample.label is None else f'"{visible(shorten(sample.label, _EXAMPLE_ANSWER))}"'
    return (
        f'sample {sample.index}: prompt "{prompt}"; answer "{answer}" ({sample.response_length} tokens,'
        f" {sample.status}); label {label}; reward {sample.reward:g}"
    )


def show_command(run: str, step: int) -> str:
    return f"fusionrl show {shlex.quote(run)} --step {step}"


def _limit(facts: RolloutFacts, settings: AdviceSettings) -> str:
    """The limit that most of the truncated answers reached, with its flag."""
    if 2 * facts.num_at_response_limit >= facts.num_truncated:
        return f"at --rollout-max-response-len {settings.max_response_len}"
    if 2 * facts.num_at_context_limit >= facts.num_truncated:
        return f"at --rollout-max-context-len {settings.max_context_len}"
    return "by a limit of the generate function (--max-turns, or the room left for a further turn)"
