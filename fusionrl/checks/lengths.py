"""Checks that prompts with their responses, and conversations, fit into the models' positions and a micro-batch.

Which rows are the longest is found by their bytes; only those that may be too long are tokenized.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from fusionrl.base.imports import quiet
from fusionrl.checks.data import added_tokens, count_tokens, light_rows, most_bytes, prompt_columns
from fusionrl.checks.images import usable_columns
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import EvalSet, readable_sets
from fusionrl.config.rollout import EvalGroup
from fusionrl.config.run_parts import (
    estimator_of,
    evaluates,
    generates,
    has_own_rollout,
    has_own_source,
    uses_trainers,
    validates,
)
from fusionrl.data.columns import TOKENS, PromptColumns, holds_tokens
from fusionrl.data.row_checks import MAX_PROMPT_CHARACTERS, metadata_and_tools
from fusionrl.data.rows import Row
from fusionrl.models.engine_config import read_scorer, same_tokens
from fusionrl.models.shape import ModelShape
from fusionrl.plan.layout import sequence_multiple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # SGLang's variable for a context beyond the positions
_OR_LONGER = f", or set {_LONGER}=1"
Count = Callable[["PreTrainedTokenizerBase", Row], "int | None"]  # tokens of a row; None: the run leaves it out


class Limit(NamedTuple):
    """Tokens of a whole sample, at most: how the limit reads, and how to raise it (nothing: it cannot be)."""

    num_tokens: int
    name: str
    cure: str = ""


_SIZE = attrgetter("num_tokens")  # of limits of one size the first counts: a larger micro-batch adds no positions


def length_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """Every set with a text that is too long, with the row, the arithmetic and the cure; and limits that are wrong."""
    if shape is None or config.model.hf_checkpoint is None:
        return []
    positions = _positions(config, shape)
    errors = _context_errors(config, positions)
    if config.run.mode == "sft":
        errors += _conversation_errors(config, positions)
    elif not has_own_rollout(config):
        errors += _sample_errors(config, positions)
    return _explained(errors, shape)


def file_length_errors(config: Config, shape: ModelShape, spec: str) -> list[str]:
    """Check one set of prompts as `length_errors` checks those of --prompt-data, for `fusionrl data check`.

    Without --rollout-max-response-len a prompt needs room for one token of a response.
    """
    config = config.changed(prompt_data=[spec]).model_copy(update={"eval": EvalGroup()})
    positions = _positions(config, shape)
    if config.rollout.rollout_max_response_len is not None:
        errors = [error.removeprefix("--prompt-data ") for error in _sample_errors(config, positions)]
        return _explained(errors, shape)
    columns, limit = _columns(config), min(_reading_limits(config, positions), key=_SIZE, default=None)
    row = None if limit is None else _find(config, spec, columns, limit.num_tokens - 1, _prompt_counter(columns))
    if limit is None or row is None:
        return []
    long = f"a prompt of {row.num_tokens} tokens leaves no room for a response in {limit.name}"
    return _explained([f"{spec}: {row.place}: {long}; leave long prompts out with --rollout-max-prompt-len"], shape)


def flag_length_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """Check lengths by the flags alone: for a cluster elsewhere, whose prompt data is not read."""
    if shape is None:
        return []
    positions, rollout = _positions(config, shape), config.rollout
    errors, length = _context_errors(config, positions), rollout.rollout_max_response_len
    is_free = config.run.mode != "sft" and rollout.rollout_max_context_len is None and not has_own_rollout(config)
    if is_free and length is not None:
        limit = Limit(positions, f"the {positions} positions of --hf-checkpoint")
        if length >= positions:
            errors.append(f"--rollout-max-response-len {length} leaves no room for a prompt in {limit.name}; lower it")
        else:
            errors += _by_flags(config, length, [limit])
    return _explained(errors, shape)


def _explained(errors: list[str], shape: ModelShape) -> list[str]:
    """Say why a model takes fewer tokens than its config.json has positions, whatever SGLang's variable says."""
    within = shape.dense_within
    if within is None:
        return errors
    own = (f"the model's {within} positions", f"the {within} positions of --hf-checkpoint")
    why = f". Beyond index_topk {within} {shape.model_type} chooses keys (DSA), which no trainer or engine here does"
    return [e.replace(_OR_LONGER, "") + why if any(name in e for name in own) else e for e in errors]


def _positions(config: Config, shape: ModelShape) -> int:
    """Tokens that the model takes: its own positions, or more if SGLang is configured to exceed them."""
    positions = context_length(shape.max_position_embeddings, shape.rope_scaling)
    may_be_longer = os.environ.get(_LONGER, "").lower() in ("1", "true")
    served, within = config.passthrough.sglang.get("context_length") or 0, shape.dense_within
    served = served if within is None else min(served, within)
    return max(positions, served) if may_be_longer else positions


def _context_errors(config: Config, positions: int) -> list[str]:
    errors, longest = [], config.rollout.rollout_max_context_len
    if longest is not None and config.run.mode != "sft":
        limits = [Limit(positions, f"the model's {positions} positions"), *_reward_model_limit(config)]
        limits += _scorer_limits(config)
        over = [limit.name for limit in limits if longest > limit.num_tokens]
        errors = [f"--rollout-max-context-len {longest} is over {name}; lower it" for name in over]
    served = config.passthrough.sglang.get("context_length")
    if served is not None and served > positions:
        flag = f"--sglang-context-length {served}"
        errors.append(f"{flag} is over the model's {positions} positions; lower it{_OR_LONGER}")
    return errors


# ------------------------------------------------------------------------------------------------ rl, eval, …
def _sample_errors(config: Config, positions: int) -> list[str]:
    errors, data, length = [], config.data, config.rollout.rollout_max_response_len
    if config.rollout.rollout_max_context_len is not None:
        return []  # no sample is longer than that, whatever its prompt
    if generates(config) and length is not None:
        limits = _reading_limits(config, positions) + _scorer_limits(config)
        # Where --rollout-max-prompt-len is given, the flags alone are held against a micro-batch (`rollout_errors`).
        if config.run.mode == "rl" and uses_trainers(config) and data.rollout_max_prompt_len is None:
            limits.append(_micro_batch(config))
        columns, response = _columns(config), (length, "--rollout-max-response-len")
        if has_own_source(config):
            errors += _by_flags(config, length, limits)
        for spec in [] if has_own_source(config) else data.prompt_data or []:
            errors += _set_errors(config, spec, "--prompt-data", columns, response, limits)
    for eval_set in readable_sets(config) if evaluates(config) else ():
        errors += _eval_errors(config, eval_set, _reading_limits(config, positions))
    return errors


def _eval_errors(config: Config, eval_set: EvalSet, limits: list[Limit]) -> list[str]:
    length, file = eval_set.max_response_len, config.eval.eval_config
    if length is None:
        return []
    flag, name = "--eval-prompt-data", "--rollout-max-response-len"
    if file is not None:
        flag, name = f"--eval-config {file}: set {eval_set.name}:", "max_response_len"
    elif length != config.rollout.rollout_max_response_len:
        name = "--eval-max-response-len"
    return _set_errors(config, eval_set.path, flag, _columns(config, eval_set), (length, name), limits)


def _reading_limits(config: Config, positions: int) -> list[Limit]:
    """List what any sample has to fit into: the engines' positions, and those of a reward model."""
    sglang, limits = config.passthrough.sglang, _reward_model_limit(config)
    served = min(positions, sglang.get("context_length") or positions)
    name = f"--sglang-context-length {served}" if served < positions else f"the {served} positions of --hf-checkpoint"
    return limits if sglang.get("allow_auto_truncate") else [Limit(served, name), *limits]


def _scorer_limits(config: Config) -> list[Limit]:
    """List the positions of a teacher and of PRIME's reward model, which read the sample's own tokens."""
    algorithm = config.algorithm
    has_teacher, has_prm = algorithm.use_opd and algorithm.opd_type == "sglang", estimator_of(algorithm).role == "prm"
    limits = _scorer_limit(algorithm.opd_teacher_load, "--opd-teacher-load") if has_teacher else []
    return limits + (_scorer_limit(config.prm.prm_load, "--prm-load") if has_prm else [])


def _reward_model_limit(config: Config) -> list[Limit]:
    folder, policy = config.reward.rm_model, config.model.hf_checkpoint
    if folder is None or policy is None or config.reward.rm_input == "chat":
        return []
    try:
        reads_tokens = config.reward.rm_input == "tokens" or same_tokens(policy, folder)
    except (OSError, ValueError):
        return []
    return _scorer_limit(folder, "--rm-model") if reads_tokens else []


def _scorer_limit(folder: str | None, flag: str) -> list[Limit]:
    try:
        num_positions = None if folder is None else read_scorer(folder, flag).max_positions
    except ValueError:  # told by the checks of these folders
        return []
    return [] if num_positions is None else [Limit(num_positions, f"the {num_positions} positions of {flag}")]


def _micro_batch(config: Config) -> Limit:
    tokens, size = config.train.max_tokens_per_gpu, config.model.context_parallel_size
    multiple = sequence_multiple(size, config.model.tensor_model_parallel_size)
    name = f"--max-tokens-per-gpu {tokens} x --context-parallel-size {size} = {tokens * size} tokens"
    return Limit(tokens * size // multiple * multiple, name, "raise --max-tokens-per-gpu, or ")


def _by_flags(config: Config, length: int, limits: list[Limit]) -> list[str]:
    """Check the lengths that the flags allow, where the prompts are not known before the run."""
    prompt, limit = config.data.rollout_max_prompt_len, min(limits, key=_SIZE, default=None)
    if prompt is None or limit is None or prompt + length <= limit.num_tokens:
        return []
    sample = f"--rollout-max-prompt-len {prompt} + --rollout-max-response-len {length} = {prompt + length} tokens"
    cure = f"{limit.cure}lower one of them, or bound both with --rollout-max-context-len {limit.num_tokens}"
    return [f"{sample} of a sample, over {limit.name}; {cure}"]


def _set_errors(
    config: Config, spec: str, flag: str, columns: PromptColumns, response: tuple[int, str], limits: list[Limit]
) -> list[str]:
    """The message of a set of prompts of which one is too long for the smallest of `limits`."""
    (length, name), limit = response, min(limits, key=_SIZE, default=None)
    if limit is None:
        return []
    room = limit.num_tokens - length
    if room < 1:
        return [] if limit.cure else [f"{name} {length} leaves no room for a prompt in {limit.name}; lower it"]
    if columns.max_prompt_len is not None and columns.max_prompt_len <= room:
        return []
    long_row = _find(config, spec, columns, room, _prompt_counter(columns))
    if long_row is None:
        return []
    sample = f"a prompt of {long_row.num_tokens} tokens + {name} {length} = {long_row.num_tokens + length}"
    cure = f"{limit.cure}leave long prompts out with --rollout-max-prompt-len {room}, lower {name}, or bound both with"
    cure += f" --rollout-max-context-len {limit.num_tokens}"
    return [f"{flag} {spec}: {long_row.place}: {sample}, over {limit.name}; {cure}"]


def _prompt_counter(columns: PromptColumns) -> Count:
    def count(tokenizer: PreTrainedTokenizerBase, row: Row) -> int | None:
        num_tokens = count_tokens(row, tokenizer, columns)
        return None if columns.max_prompt_len is not None and num_tokens > columns.max_prompt_len else num_tokens

    return count


# ------------------------------------------------------------------------------------------------ sft
def _conversation_errors(config: Config, positions: int) -> list[str]:
    if has_own_rollout(config) or not uses_trainers(config):
        return []
    own, errors = usable_columns(prompt_columns(config)), []
    specs = [(spec, "--prompt-data", own) for spec in config.data.prompt_data or []]
    if has_own_source(config) or config.run.load_debug_rollout_data:
        specs = []
    for each in readable_sets(config) if validates(config) else ():
        specs.append((each.path, "--eval-prompt-data", usable_columns(own.of_set(each, keeps_messages=False))))
    limit = _conversation_limit(config, positions)
    for spec, flag, columns in specs:
        long_row = _find(config, spec, columns, limit.num_tokens, _conversation_counter(config, columns))
        if long_row is not None:
            long = f"it has {long_row.num_tokens} tokens, over {limit.name}"
            errors.append(f"{flag} {spec}: {long_row.place}: {long}; {limit.cure}")
    return errors


def conversation_limit(config: Config, shape: ModelShape) -> Limit | None:
    """Return what a supervised sample has to fit into, for `fusionrl data check`.

    None for a rollout function of the user's, which may cut what is too long.
    """
    return None if has_own_rollout(config) else _conversation_limit(config, _positions(config, shape))


def _conversation_limit(config: Config, positions: int) -> Limit:
    model = Limit(positions, f"the {positions} positions of --hf-checkpoint", "leave it out, or shorten it")
    batch = _micro_batch(config)
    return min(model, batch._replace(cure=f"{batch.cure}leave it out"), key=_SIZE)


def _conversation_counter(config: Config, columns: PromptColumns) -> Count:
    from fusionrl.data.supervised import SupervisedSamples

    @functools.cache
    def supervised(tokenizer: PreTrainedTokenizerBase) -> SupervisedSamples:
        return SupervisedSamples(tokenizer, config.data.loss_mask_type, config.data.apply_chat_template_kwargs)

    def count(tokenizer: PreTrainedTokenizerBase, row: Row) -> int:
        if holds_tokens(row):
            return len(row[TOKENS]) + added_tokens(row)
        label, tools = row.get(columns.label_key or ""), metadata_and_tools(row, columns)[1]
        return supervised(tokenizer).make(row[columns.input_key], label, tools).num_tokens + added_tokens(row)

    return count


# ------------------------------------------------------------------------------------------------ shared
def _columns(config: Config, eval_set: EvalSet | None = None) -> PromptColumns:
    """Return the columns of --prompt-data, or of an evaluation set."""
    columns = prompt_columns(config)
    columns = columns if eval_set is None else columns.of_set(eval_set, keeps_messages=False)
    return usable_columns(replace(columns, label_key=None, keeps_messages=False))


def _find(config: Config, spec: str, columns: PromptColumns, limit: int, count: Count) -> LongRow | None:
    """A row of the set with more than `limit` tokens; other checks find the rows that cannot be counted."""

    def counted(row: Row) -> int | None:
        prompt = row.get(columns.input_key)
        if isinstance(prompt, str) and len(prompt) > MAX_PROMPT_CHARACTERS:
            return None
        try:
            return count(tokenizer, row)
        except (ValueError, KeyError, TypeError):
            return None

    try:
        rows = light_rows(spec, columns, config.run.mode == "sft")
        keys = (columns.input_key, columns.label_key, columns.tool_key, TOKENS)
        candidates = most_bytes(rows, keys, columns.metadata_key)
        if not candidates or candidates[0][0] <= limit:
            return None
        from fusionrl.data.tokenizer import load_tokenizer

        with quiet():
            tokenizer = load_tokenizer(str(config.model.hf_checkpoint))
            return first_over(candidates, limit, counted)
    except (ValueError, OSError):  # a file or a tokenizer that has its own message
        return None


BUDGET_S = 5.0  # … for at most so long


class LongRow(NamedTuple):
    """A row: its place in the file and its number of tokens."""

    place: str
    num_tokens: int


def context_length(max_positions: int, rope_scaling: Mapping[str, object] | None) -> int:
    """Tokens of a prompt with its response that a model's config.json allows for.

    `max_positions` counts the scaled positions where `rope_scaling` names the original ones (yarn) or is llama3's; any
    other scaling multiplies them by its factor. So SGLang counts (`get_context_length`), and transformers' models too.
    """
    if not rope_scaling or "original_max_position_embeddings" in rope_scaling:
        return max_positions
    if rope_scaling.get("rope_type") in ("default", "llama3"):
        return max_positions
    factor = rope_scaling.get("factor", 1)
    if not isinstance(factor, int | float):
        raise ValueError(f"rope_scaling has the factor {factor!r}, not a number")
    return int(factor * max_positions)


def first_over(
    candidates: Iterable[tuple[int, str, Row]], limit: int, count: Callable[[Row], int | None]
) -> LongRow | None:
    """The first of `candidates` (as `most_bytes` gives them) with more than `limit` tokens.

    count  a row's tokens; None where the run leaves the row out
    """
    deadline = time.monotonic() + BUDGET_S
    for at_most, place, row in candidates:
        if at_most <= limit or time.monotonic() > deadline:
            return None
        num_tokens = count(row)
        if num_tokens is not None and num_tokens > limit:
            return LongRow(place, num_tokens)
    return None
