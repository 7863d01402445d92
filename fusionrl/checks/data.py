"""Checks of prompt data by reading it: before a run, and all that is wrong with it for `fusionrl data check`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import heapq
import itertools
import json
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionrl.base.imports import quiet
from fusionrl.base.wording import attempt
from fusionrl.checks.images import image_text, usable_columns
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import readable_sets
from fusionrl.config.run_parts import has_own_source, reads_prompts
from fusionrl.data.columns import LOSS_MASK, TOKENS, PromptColumns, holds_tokens
from fusionrl.data.findings import Finding, FindingError, Findings
from fusionrl.data.images import ImageRef
from fusionrl.data.prompts import (
    check_file,
    is_surely_too_long,
    load_prompts,
    placeholder_of,
    prompt_ids,
    render_prompt,
    special_tokens_of,
    template_probe,
)
from fusionrl.data.row_checks import AskReward, RowChecker, column_finding, metadata_and_tools, see
from fusionrl.data.rows import Row, parse_set, parse_sets, read_rows, scan_rows
from fusionrl.data.sample import response_mask
from fusionrl.data.tokenizer import TokenizerFiles, read_tokenizer_files
from fusionrl.models.engine_config import has_chat_template
from fusionrl.rewards.registry import LabelCheck

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fusionrl.data.supervised import SupervisedSamples

FEW_ROWS = 1_000  # prompts that are tokenized within a second
# How chat templates mark turns: <|im_start|>, <|user|>, [INST], <start_of_turn>, <s>.
_MARK = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|\[/?INST\]|<(?:start|end)_of_turn>|</?s>")


def check_prompts(config: Config, errors: list[str], warnings: list[str], vocab_size: int | None = None) -> int:
    """Read the prompt data, and return its number of prompts, 0 where it is not known; mistakes go to `errors`."""
    data, count = config.data, 0
    if data.prompt_data is not None and config.run.mode != "eval":
        count = _check_prompt_data(config, errors, warnings, vocab_size)
    if data.apply_chat_template and _has_template(config) is False:
        folder = config.model.hf_checkpoint
        errors.append(f"--apply-chat-template: the tokenizer of --hf-checkpoint {folder} has no chat template")
    return count


def prompt_columns(config: Config) -> PromptColumns:
    """Return what the flags say about the columns of the prompt data."""
    args = config.to_args()
    return PromptColumns.of(args, reads_prompts(args.rollout_function_path, args.custom_generate_function_path))


def tokenizer_files(config: Config) -> TokenizerFiles | None:
    """Return the settings in the tokenizer's files; None without such a folder."""
    folder = config.model.hf_checkpoint
    return read_tokenizer_files(folder) if folder is not None and Path(folder).is_dir() else None


def check_set(
    config: Config,
    files: TokenizerFiles | None,
    spec: str,
    columns: PromptColumns,
    flags: tuple[str, str],
    vocab_size: int | None,
    ask_reward: LabelCheck | None,
) -> Findings:
    """Read one set and check its rows, also by the chat template. `flags`: those of the set and of its column."""
    (flag, key_flag), is_sft, probe = flags, config.run.mode == "sft", None

    def load() -> PreTrainedTokenizerBase:
        from fusionrl.data.tokenizer import load_tokenizer

        return load_tokenizer(str(config.model.hf_checkpoint))

    if files is not None:
        probe = template_probe(files, columns, load, config.data.loss_mask_type if is_sft else None)
    columns = usable_columns(columns)
    placeholder = image_text(columns.images, files)
    checker = RowChecker(
        columns,
        key_flag,
        is_sft=is_sft,
        special_tokens=files.special_tokens if files else (),
        probe=probe,
        vocab_size=vocab_size,
        ask_reward=ask_reward,
        placeholder=placeholder,
    )
    return check_file(spec, flag, checker)


def _check_prompt_data(config: Config, errors: list[str], warnings: list[str], vocab_size: int | None) -> int:
    """Return the number of prompts of all sets, which --num-epoch counts; 0 where it is not known."""
    data, is_sft = config.data, config.run.mode == "sft"
    specs, weights, columns = data.prompt_data or [], data.prompt_data_weights, usable_columns(prompt_columns(config))
    flag = f"--prompt-data-weights {' '.join(map(str, weights))}"
    if weights and len(weights) != len(specs):
        errors.append(f"{flag}: {len(weights)} weights for {len(specs)} sets of --prompt-data; give one for each")
    if any(weight <= 0 for weight in weights):
        errors.append(f"{flag}: each must be over 0; leave the other sets out")
    if attempt(errors, lambda: parse_sets(specs)) is None:
        return 0
    total, num_errors, files = 0, len(errors), tokenizer_files(config)
    flags = ("--prompt-data", "--input-key")
    for spec in specs:
        check = check_set(config, files, spec, columns, flags, vocab_size, LabelCheck.of_run(config))
        errors += check.errors
        warnings += check.warnings
        total += check.num_rows
        if is_sft and not check.errors and _has_template(config) is False:
            first = next(read_rows(spec))[1]
            if isinstance(first.get(data.input_key), list) and not holds_tokens(first):
                folder = config.model.hf_checkpoint
                errors.append(f"--mode sft: the tokenizer of --hf-checkpoint {folder} has no chat template")
    if len(errors) > num_errors:
        return 0  # how many rows of a bad set are prompts is nothing to count epochs by
    is_filtered = data.rollout_max_prompt_len is not None and not is_sft
    if is_filtered and _has_template(config) is not None:
        if config.run.num_rollout is None or total <= FEW_ROWS:
            return _count_prompts(config, specs, columns, errors)
        errors += _without_prompts(config, specs, columns)
    return total


def _count_prompts(config: Config, specs: list[str], columns: PromptColumns, errors: list[str]) -> int:
    """Return the number of prompts that are not too long: where epochs are counted by it, or the rows are few."""
    from fusionrl.data.tokenizer import load_tokenizer

    try:
        with quiet():
            tokenizer = load_tokenizer(str(config.model.hf_checkpoint))
            return sum(len(load_prompts(spec, tokenizer, columns).samples) for spec in specs)
    except (ValueError, OSError) as error:
        errors.append(str(error))
        return 0


def _without_prompts(config: Config, specs: list[str], columns: PromptColumns) -> list[str]:
    """Return a message for each set of which the limit of prompt tokens leaves nothing.

    Rows are tokenized until one fits, those with the fewest bytes first: mostly one row.
    """
    from fusionrl.data.tokenizer import load_tokenizer

    with quiet():
        tokenizer = load_tokenizer(str(config.model.hf_checkpoint))

    def fits(row: Row) -> bool:
        try:
            return count_tokens(row, tokenizer, columns) <= (columns.max_prompt_len or 0)
        except ValueError:  # what cannot be rendered here is another check's
            return True

    errors, limit = [], f"--rollout-max-prompt-len {columns.max_prompt_len}"
    for spec in specs:
        shortest = fewest_bytes(light_rows(spec, columns), (columns.input_key, columns.tool_key))
        # The fewest bytes may not be the fewest tokens: all rows are asked before a run is refused.
        if not any(map(fits, itertools.chain(shortest, (row for _, row in light_rows(spec, columns))))):
            errors.append(f"--prompt-data {spec}: no prompt is left: the shortest are over {limit}")
    return errors


def _has_template(config: Config) -> bool | None:
    folder = config.model.hf_checkpoint
    return has_chat_template(folder) if folder is not None and Path(folder).is_dir() else None


def chat_warnings(config: Config) -> list[str]:
    """The warning, where the default functions would give text to a model whose tokenizer has a chat template.

    A text that has marks of turns is rendered already, and a user's rollout, generate or data source function may
    render prompts itself. (A list of messages without --apply-chat-template is an error.)
    """
    data, rollout, folder = config.data, config.rollout, config.model.hf_checkpoint
    functions = (rollout.rollout_function_path, rollout.custom_generate_function_path)
    is_own = has_own_source(config) or reads_prompts(*functions)
    is_silent = config.run.mode == "sft" or data.apply_chat_template or config.run.load_debug_rollout_data is not None
    if is_own or is_silent or folder is None or not Path(folder).is_dir() or not has_chat_template(folder):
        return []
    flag, prompt = _first_prompt(config)
    marks = [token for token in read_tokenizer_files(folder).special_tokens if len(token) > 1]
    if not isinstance(prompt, str) or _MARK.search(prompt) or any(mark in prompt for mark in marks):
        return []
    text = "its prompts are plain text, and the tokenizer of --hf-checkpoint has a chat template"
    return [f"{flag}: {text}; add --apply-chat-template, or a chat model may never stop (a base model needs none)"]


def _first_prompt(config: Config) -> tuple[str, object]:
    """(the flag, the prompt of its first row); None where there is none, or none that can be read."""
    sets = [("--prompt-data", path, config.data.input_key) for path in config.data.prompt_data or []]
    if config.run.mode == "eval":
        sets = [(f"evaluation set {each.name}", each.path, each.input_key) for each in readable_sets(config)]
    for flag, path, key in sets[:1]:
        with contextlib.suppress(ValueError):  # data that cannot be read is an error elsewhere
            for _, row in read_rows(path, flag):
                return flag, row.get(key)
    return "", None


@dataclass
class DataCheck:
    """Checks sets one after the other; a prompt that stands twice is found across them, too.

    tokenizer    without it prompts are neither rendered nor counted in tokens
    limit        tokens of a supervised sample, at most, and the finding about a longer one
    lengths      tokens of the prompts, or of the whole supervised samples, of the rows without a mistake; those that
                 are too long are counted, too
    num_trained  tokens of supervised samples that are trained on, of the same rows
    """

    columns: PromptColumns
    tokenizer: Any = None
    is_sft: bool = False
    loss_mask_type: str = "auto"
    vocab_size: int | None = None
    ask_reward: AskReward | None = None
    limit: tuple[int, Finding] | None = None
    num_rows: int = 0
    lengths: list[int] = field(default_factory=list)
    num_trained: list[int] = field(default_factory=list)
    _seen: dict[bytes, tuple[str, Any]] = field(default_factory=dict)

    def problems(self, spec: str) -> tuple[list[str], list[str]]:
        """(errors, warnings) of a set: one text a cause, with the number of rows and the first of them."""
        named: dict[str, Any] = {"vocab_size": self.vocab_size, "ask_reward": self.ask_reward}
        if self.tokenizer is not None:
            named["special_tokens"] = special_tokens_of(self.tokenizer)
            named["placeholder"] = placeholder_of(self.tokenizer, self.columns)
        from fusionrl.data.image_rows import decoded_ref

        self._checker = RowChecker(self.columns, is_sft=self.is_sft, take_image=decoded_ref, **named)
        check = check_file(spec, "", self._checker, self._more_findings)
        self.num_rows += check.num_rows
        return check.errors, check.warnings

    def _more_findings(self, where: str, row: Row, findings: list[Finding]) -> list[Finding]:
        mistakes = [finding.cause for finding in findings if not finding.is_warning]
        columns = self.columns
        needed = (TOKENS, LOSS_MASK) if self.is_sft and holds_tokens(row) else (columns.input_key,)
        if any(cause.startswith(f"column {key!r}") for cause in mistakes for key in needed):
            return []  # other problems of the row may follow from this one
        tools = self._checker.tools
        has_label = columns.label_key is None or columns.label_key in row
        if (seen := self._checker.seen) is None:
            return []
        prompt, images = seen.prompt, seen.images
        duplicates = self._duplicate(row, prompt, tools, images, where) if has_label else []
        if self.tokenizer is None:
            return duplicates
        try:
            length_findings = self._sample_findings if self.is_sft else self._prompt_findings
            return duplicates + length_findings(row, prompt, tools, images, is_counted=not mistakes)
        except ValueError as error:
            return [*duplicates, column_finding(columns.input_key, error)]

    def _prompt_findings(
        self, row: Row, prompt: object, tools: object, images: list[ImageRef], *, is_counted: bool
    ) -> list[Finding]:
        columns = self.columns
        if isinstance(prompt, list) and not columns.apply_chat_template:
            return []  # a user's function makes tokens of it
        assert isinstance(prompt, str | list)
        text, _, _, left_out = render_prompt(prompt, self.tokenizer, columns, tools)
        findings = [] if left_out is None else [column_finding(columns.input_key, FindingError(left_out))]
        cause = f"the prompt is longer than --rollout-max-prompt-len {columns.max_prompt_len}"
        if is_surely_too_long(text, columns.max_prompt_len):
            return [*findings, Finding(cause, "by its characters alone; tokens were not counted")]
        length = len(prompt_ids(text, images, self.tokenizer, columns)[0])
        if is_counted:
            self.lengths.append(length)
        if columns.max_prompt_len is not None and length > columns.max_prompt_len:
            findings.append(Finding(cause, f"{length} tokens"))
        return findings

    def _sample_findings(
        self, row: Row, prompt: object, tools: object, images: list[ImageRef], *, is_counted: bool
    ) -> list[Finding]:
        from fusionrl.data.supervised import token_sample, with_images

        label = row.get(self.columns.label_key or "")
        if holds_tokens(row):
            sample = token_sample(row, "")
        elif isinstance(prompt, str) and not isinstance(label, str):
            return []  # the checker has named it
        else:
            sample = self._supervised.make(prompt, label, tools)
        if self.columns.images is not None:
            sample = with_images(sample, images, self.columns.images.processor.placeholder)
        if is_counted:
            self.lengths.append(sample.num_tokens)
            self.num_trained.append(int(response_mask(sample).sum()))
        if self.limit is None or sample.num_tokens <= self.limit[0]:
            return []
        return [replace(self.limit[1], detail=f"{sample.num_tokens} tokens")]

    @functools.cached_property
    def _supervised(self) -> SupervisedSamples:
        from fusionrl.data.supervised import SupervisedSamples

        return SupervisedSamples(self.tokenizer, self.loss_mask_type, self.columns.chat_template_kwargs)

    def _duplicate(self, row: Row, prompt: object, tools: object, images: list[ImageRef], where: str) -> list[Finding]:
        label, keys = row.get(self.columns.label_key or ""), [image.key for image in images]
        key_parts = [prompt, tools, keys]
        if self.is_sft:  # several answers to one prompt are several samples
            key_parts += [label] if isinstance(prompt, str) else []
            key_parts, label = ([row[TOKENS], row[LOSS_MASK], keys] if holds_tokens(row) else key_parts), None
        text = json.dumps(key_parts, sort_keys=True, default=repr)
        first, first_label = self._seen.setdefault(hashlib.sha256(text.encode()).digest(), (where, label))
        if first == where:
            return []
        if first_label == label:
            cause = "the same sample as an earlier row" if self.is_sft else "the same prompt as an earlier row"
            return [Finding(cause, first, is_warning=True)]
        return [Finding("the same prompt as an earlier row, with another label", first)]

    def summary(self) -> str:
        """Return the number of rows, and the range of their numbers of tokens where they are known."""
        text = f"{self.num_rows} rows"
        of_rows = "tokens" if self.is_sft else "prompt tokens"
        for name, counts in ((of_rows, self.lengths), ("trained", self.num_trained)):
            if counts:
                text += f", {name} min {min(counts)} median {statistics.median(counts):g} max {max(counts)}"
        return text + (f", {sum(self.num_trained):,} in all" if self.num_trained else "")


NUM_CANDIDATES = 256  # rows that are tokenized, those with the most bytes first …
# Tokens that a chat template may add to the text: its own words, and the marks of each message.
TEMPLATE_TOKENS, MESSAGE_TOKENS = 256, 16


IMAGE_TOKENS = "\0image tokens"  # of a row of `light_rows`: tokens of each of its images


def most_bytes(
    rows: Iterable[tuple[str, Row]], keys: tuple[str | None, ...], metadata_key: str | None = None
) -> list[tuple[int, str, Row]]:
    """Return the rows with the most text in the columns `keys`, longest first: (tokens at most, place, row).

    A tokenizer makes at most one token of a byte, apart from the marks that a template adds.

    metadata_key  column of metadata, which may hold tools
    """
    sized = _sized(rows, keys, metadata_key)
    return [(size, place, row) for size, _, place, row in heapq.nlargest(NUM_CANDIDATES, sized)]


def fewest_bytes(rows: Iterable[tuple[str, Row]], keys: tuple[str | None, ...]) -> list[Row]:
    """The rows with the least text in the columns `keys`, shortest first."""
    return [row for _, _, _, row in heapq.nsmallest(NUM_CANDIDATES, _sized(rows, keys))]


def _sized(
    rows: Iterable[tuple[str, Row]], keys: tuple[str | None, ...], metadata_key: str | None = None
) -> Iterable[tuple[int, int, str, Row]]:
    for number, (place, row) in enumerate(rows):
        values = [row[key] for key in keys if key is not None and row.get(key) is not None]
        metadata = row.get(metadata_key or "")
        if isinstance(metadata, dict | str) and "tools" in metadata:  # an object, or its JSON
            values.append(metadata["tools"] if isinstance(metadata, dict) else metadata)
        num_messages = sum(len(value) for value in values if isinstance(value, list))
        num_bytes = sum(_num_bytes(value) for value in values) + sum(row.get(IMAGE_TOKENS, ()))
        # The number, so that no two rows of one size are compared by their contents.
        yield num_bytes + MESSAGE_TOKENS * num_messages + TEMPLATE_TOKENS, -number, place, row


def _num_bytes(value: object) -> int:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return len(text.encode(errors="surrogatepass"))


def light_rows(spec: str, columns: PromptColumns, is_sft: bool = False) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) of the rows that can be read, with the numbers of tokens of their images in place of these."""
    data_file = parse_set(spec, "").path
    for place, row in scan_rows(spec, ""):
        with contextlib.suppress(ValueError):
            if not isinstance(row, ValueError):
                yield place, _light_row(row, columns, is_sft, data_file)


def _light_row(row: Row, columns: PromptColumns, is_sft: bool, data_file: Path) -> Row:
    if (column := columns.images) is None:
        return row
    from fusionrl.data.image_rows import header_ref, read_images

    seen = see(row, columns, is_sft)
    images, findings = read_images(seen.values, column, column.folder_of(data_file), header_ref)
    if findings:
        raise FindingError(findings[0])
    rest = {key: value for key, value in row.items() if key != column.key}
    return {**rest, columns.input_key: seen.prompt, IMAGE_TOKENS: [image.num_tokens for image in images]}


def added_tokens(row: Row) -> int:
    """Return the tokens of a row's images beyond one for each, which a rendering has."""
    return sum(count - 1 for count in row.get(IMAGE_TOKENS, ()))


def count_tokens(row: Row, tokenizer: PreTrainedTokenizerBase, columns: PromptColumns) -> int:
    tools = metadata_and_tools(row, columns)[1]
    prompt = render_prompt(row[columns.input_key], tokenizer, columns, tools).text
    return len(tokenizer.encode(prompt, add_special_tokens=False)) + added_tokens(row)
