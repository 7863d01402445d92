"""Checks of a model's folder: its tokenizer, chat template, the tokens that end an answer, and its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.checks.doctor.findings import Finding, fact, fault, warning
from fusionrl.config.config import Config
from fusionrl.data.image_rows import ImageColumn
from fusionrl.data.tokenizer import TemplateError, call_template
from fusionrl.data.tokenizer_files import read_end_tokens
from fusionrl.models.weight_files import stored_tensors

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
