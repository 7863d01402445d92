"""Probes of a model's folder and of the reward: tokenizer, chat template, end tokens, weights, a few graded rows.

The gold label must score above an empty answer. It is tried in several common forms, as no flag says which one the
reward looks for; --gold names another.
"""

from __future__ import annotations

import asyncio
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.checks.doctor.findings import Finding, fact, fault, warning
from fusionrl.config.config import Config
from fusionrl.data.columns import ImageColumn
from fusionrl.data.render import TemplateError, call_template
from fusionrl.data.sample import REWARD_LOST, Sample
from fusionrl.data.tokenizer import read_end_tokens
from fusionrl.models.hf_folder import stored_tensors
from fusionrl.rewards.dispatch import RewardError, RewardSettings, score_group
from fusionrl.rewards.registry import MODEL, REMOTE, RM_TYPES, parse_rm_type, reward_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHECK, _TEMPLATE, _WEIGHTS = "tokens", "template", "weights"
_FLOATS = ("F16", "BF16", "F32", "F64")
# A lossy tokenizer loses these first: spaces, new lines, digits, marks, letters of other scripts.
_TEXT = "A  b\n\n\tc 12,345.67 \\boxed{x^2} <b>ü</b> 中文"
_QUESTION, _ANSWER = "How much is 17 and 25?", "It is 42, of course."
_TURNS = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
_MARK = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>")


def end_findings(
    tokenizer: PreTrainedTokenizerBase, config: Config, vocab_size: int, kwargs: Mapping[str, object] | None
) -> list[Finding]:
    """Check that an engine stops at a token by which the model can end an answer; `kwargs`: of the template, if any."""
    folder = Path(str(config.model.hf_checkpoint))
    stops = {*config.rollout.rollout_stop_token_ids, *read_end_tokens(folder)}
    if tokenizer.eos_token_id is not None:
        stops.add(int(tokenizer.eos_token_id))
    cure = f"set eos_token_id in {folder}/generation_config.json, or give --rollout-stop-token-ids"
    if not stops:
        return [fault("end", "no file of --hf-checkpoint names a token that ends an answer", cure)]
    can_emit = sorted(stop for stop in stops if 0 <= stop < vocab_size)
    if not can_emit:
        text = f"the tokens that end an answer, {sorted(stops)}, are outside of the model's vocabulary of {vocab_size}"
        return [fault("end", f"{text}: it cannot emit one", cure)]
    named = ", ".join(f"{stop} {tokenizer.convert_ids_to_tokens(stop)!r}" for stop in can_emit)
    last = None if kwargs is None else _end_of_turn(tokenizer, kwargs)
    if last is not None and last not in stops:
        text = f"the chat template ends a turn with {last} {tokenizer.convert_ids_to_tokens(last)!r}"
        return [fault("end", f"{text}, and engines stop only at {named}: answers run to their limit", cure)]
    at = f"; the chat template ends a turn with {last}" if last is not None else ""
    return [fact("end", f"engines stop at {named}{at}")]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, object]) -> int | None:
    """Return the control token that the template writes right after an answer; None: it writes none, or refuses."""
    try:
        text = call_template(tokenizer.apply_chat_template, _TURNS, tokenize=False, **kwargs)
    except TemplateError:
        return None
    _, marker, after = text.rpartition(_ANSWER)
    if not marker:
        return None
    ids = tokenizer.encode(after.lstrip(), add_special_tokens=False)
    return int(ids[0]) if ids and ids[0] in tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder) else None


def tokenizer_findings(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[Finding]:
    """Check that text comes back from tokens, and that the model has an embedding for each token."""
    ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    findings = []
    if back.strip() != _TEXT:  # some write a space before the first word
        cure = "rewards see decoded text: use the tokenizer that the model was trained with, and its settings"
        findings.append(warning(_CHECK, f"the tokenizer does not give back {_TEXT!r}: {back!r}", cure))
    highest = max([*tokenizer.added_tokens_decoder, len(tokenizer) - 1])
    if highest >= vocab_size:
        cure = "use the tokenizer of this model, or resize its embeddings to the tokenizer"
        text = f"the tokenizer has token {highest}, the model has {vocab_size} embeddings"
        findings.append(fault(_CHECK, text, cure))
    return findings or [fact(_CHECK, f"{len(tokenizer)} tokens for {vocab_size} embeddings; text comes back unchanged")]


def template_findings(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, object]) -> list[Finding]:
    """Check that the chat template keeps what is said, and that its marks are tokens of this tokenizer."""
    turns = [*_TURNS, {"role": "user", "content": _QUESTION[::-1]}]
    try:
        text = call_template(tokenizer.apply_chat_template, turns, tokenize=False, add_generation_prompt=True, **kwargs)
    except TemplateError as error:
        cure = "correct chat_template in the model's folder, or --apply-chat-template-kwargs"
        return [fault(_TEMPLATE, f"the chat template refuses a conversation ({error})", cure)]
    lost = [turn["content"] for turn in turns if turn["content"] not in text]
    if lost:
        cure = "take the template that came with the model (chat_template.jinja, or tokenizer_config.json)"
        return [fault(_TEMPLATE, f"the chat template leaves out {lost[0]!r}", cure)]
    ids = tokenizer.encode(text, add_special_tokens=False)
    back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    split = sorted({mark for mark in _MARK.findall(text) if len(tokenizer.encode(mark, add_special_tokens=False)) > 1})
    findings = []
    if split:
        cure = "take the model's own template, unless it was trained with marks that are plain text"
        text = f"the chat template writes {', '.join(split)}, not as one token but as letters: of another model?"
        findings.append(warning(_TEMPLATE, text, cure))
    if back.strip() != text.strip() and not split:
        cure = "use tokenizer and template of the same model; prompts reach it spoilt"
        text = f"a rendered conversation does not come back from its tokens: {back!r:.200}"
        findings.append(warning(_TEMPLATE, text, cure))
    return findings or [fact(_TEMPLATE, "a conversation keeps its words and comes back from its tokens unchanged")]


def image_findings(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """Say what images cost; the flags' checks have read the processor's files and rendered one."""
    column = ImageColumn.of(config.data, config.model.hf_checkpoint)
    if column is None:
        return []
    limits, name = column.processor.limits, tokenizer.convert_ids_to_tokens(column.processor.placeholder)
    pixels = f"{limits.min_pixels:,} to {limits.max_pixels:,} pixels"
    tokens = f"up to {limits.max_pixels // limits.unit**2:,} tokens {name}"
    return [fact("images", f"{pixels}, {tokens} of {limits.unit} x {limits.unit} pixels each")]


def prompt_findings(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[Finding]:
    """Check the begin token of a rendered prompt: neither missing nor doubled."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    name = tokenizer.bos_token
    if ids[:2] == [bos, bos]:
        cure = f"take {name} out of the prompts, or out of the chat template: one of them is enough"
        return [fault("bos", f"the first prompt begins with {name} twice", cure)]
    if tokenizer.encode("a")[:1] == [bos] and ids[:1] != [bos]:
        cure = f"add --apply-chat-template where the template writes it, or begin each prompt with {name}"
        return [warning("bos", f"the model was trained with {name} first, and the first prompt has none", cure)]
    is_first = ids[:1] == [bos]
    return [fact("bos", f"prompts begin with {name}" if is_first else f"prompts have no {name}, as in training")]


def label_findings(tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], longest: int | None) -> list[Finding]:
    """Check that the model can write the labels: its tokens spell them, within --rollout-max-response-len."""
    for label in labels:
        ids = tokenizer.encode(label, add_special_tokens=False)
        back = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if back.strip() != label.strip():
            text = f"the label {label!r:.60} comes back from its tokens as {back!r:.60}"
            return [fault("label", text, "the model cannot write this answer: change the labels, or the model")]
        if longest is not None and len(ids) > longest:
            text = f"the label {label!r:.60} has {len(ids)} tokens, answers have at most {longest}"
            return [fault("label", text, f"raise --rollout-max-response-len {longest} well over {len(ids)}")]
    return []


def weight_findings(folder: Path) -> list[Finding]:
    """Read every tensor of a Hugging Face folder, one at a time, and look for what is not finite."""
    import torch
    from safetensors import safe_open

    try:
        stored = stored_tensors(folder)
    except ValueError as error:
        return [fault(_WEIGHTS, str(error), "copy the model again")]
    bad, num_read = [], 0
    for file in sorted({tensor.file for tensor in stored.values()}):
        with safe_open(file, framework="pt") as reader:
            for name in sorted(name for name, tensor in stored.items() if tensor.file == file):
                if stored[name].dtype in _FLOATS:
                    num_read += 1
                    bad += [] if torch.isfinite(reader.get_tensor(name)).all() else [name]
    if bad:
        text = f"{len(bad)} of {num_read} tensors have values that are not finite, the first: {bad[0]}"
        return [fault(_WEIGHTS, text, "copy the model again, or take an earlier checkpoint")]
    return [fact(_WEIGHTS, f"all values of {num_read} tensors are finite")]


_REWARD = "reward"
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
    is_label = (
        reward.custom_rm_path is None and reward.rm_type in RM_TYPES and reward_of(reward.rm_type).label == "answer"
    )
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
    has_gold = any(reward_of(name).label not in ("tests", "unread") for name in names)
    return None if has_gold else f"--rm-type {reward.rm_type} reads no answer in the label"


def reward_findings(config: Config, args: Namespace, rows: Sequence[Sample], gold: str | None) -> list[Finding]:
    """Score gold and empty answers of `rows`, by the function and in the processes that a run uses.

    args  as a hook gets them
    gold  --gold; None: the forms above are tried
    """
    reason = why_unprobed(config)
    if reason is not None:
        return [fact(_REWARD, f"not probed: {reason}")]
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
        return [fact(_REWARD, "not probed: no label is a text or a number")]
    return [fact(_REWARD, f"the gold label scores above an empty answer in {len(problems)} rows ({problems[0]})")]


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
        return fault(_REWARD, f"{error}".splitlines()[0], "correct the function; the run would end with this")
    if any(sample.metadata.get(REWARD_LOST) for sample in samples):
        text = f"{name} gave no reward within {settings.timeout_s:g} s, or its process died, at the label {label!r:.60}"
        return fault(
            _REWARD, text, "call the function in a file of its own with such a sample, and see where it stands"
        )
    key = config.reward.reward_key
    try:
        scores = [_number(reward, key) for reward in rewards]
    except (KeyError, TypeError, ValueError):
        return fault(_REWARD, f"{name} gives {rewards[0]!r:.120}", f"name a number of it: --reward-key (now {key})")
    best, empty = max(scores[:-1]), scores[-1]
    if best > empty:
        answer = samples[scores.index(best)].response
        problems.append(f"label {label!r:.40}: {best:g} for {answer!r:.60}, {empty:g} for an empty one")
        return None
    forms = "in each form that was tried" if gold is None else f"as --gold {gold}"
    text = f"{name}: the gold label {label!r:.60} scores {best:g} {forms}, an empty answer {empty:g}"
    if config.reward.custom_rm_path and gold is None:
        cure = "if it wants another form, give it: --gold 'FINAL: {label}'; else look why it does not see the label"
        return warning(_REWARD, text, cure)
    cure = "check --label-key and the form of the labels, and choose the reward that fits (docs/guides/rewards.md)"
    return fault(_REWARD, text, cure)


def _number(reward: float | Mapping[str, object], key: str | None) -> float:
    if isinstance(reward, Mapping):
        return float(reward[key or ""])  # type: ignore[arg-type]  # what it holds is the user's
    return float(reward)
