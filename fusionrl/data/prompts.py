"""Prompt data: rows are checked, become `Sample`s with token ids, and are drawn epoch after epoch or mixed by weight.

Nothing is skipped in silence: a malformed line is an error with its number; a prompt that is too long is left out
and counted. Where a set stands is one number, how many of its prompts were drawn. A set's epoch and offset, its order
in that epoch (with the seed), and the set that is drawn next follow from these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fusionrl.data.columns import PromptColumns, holds_tokens
from fusionrl.data.findings import Finding, FindingError, Findings
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageRef, ImageSpan, expanded
from fusionrl.data.render import CONTEXT, TOOLS, Messages, Rendered, render_messages
from fusionrl.data.row_checks import MAX_PROMPT_CHARACTERS, MAX_TOKEN_CHARACTERS, RowChecker
from fusionrl.data.rows import Row, line_finding, parse_set, read_rows, scan_rows
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import set_images
from fusionrl.data.tokenizer import TemplateProbe, TokenizerFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class PromptDataset:
    """Prompts of one file: one `Sample` a row, without a response; and how many were too long."""

    samples: list[Sample]
    num_too_long: int = 0


def check_file(
    path: str | Path,
    flag: str,
    checker: RowChecker,
    more: Callable[[str, Row, list[Finding]], list[Finding]] | None = None,
) -> Findings:
    """Check every row of a set; `more` returns further findings of a row, of its place and what the checker found."""
    where = f"{flag} {path}".strip()
    findings = Findings(where)
    try:
        prompt_set = parse_set(path, flag)
        checker.data_file, checker.columns = prompt_set.path, checker.columns.in_set(prompt_set.name)
        for place, row in scan_rows(path, flag):
            findings.num_rows += 1
            row_findings = checker.findings(row) if isinstance(row, dict) else [line_finding(row)]
            if more is not None and isinstance(row, dict):
                row_findings = row_findings + more(f"{path}: {place}", row, row_findings)
            for finding in row_findings:
                findings.add(place, finding)
    except ValueError as error:
        findings.failures.append(str(error).strip())
    if not findings.num_rows and not findings.failures:
        findings.failures.append(f"{where}: it has no rows")
    if (column := checker.columns.images) is not None and not checker.num_with_images and not findings.errors:
        findings.remarks.append(f"{where}: no row has an image (--multimodal-keys: column {column.key!r})")
    return findings


def template_probe(
    files: TokenizerFiles,
    columns: PromptColumns,
    load: Callable[[], PreTrainedTokenizerBase],
    loss_mask_type: str | None = None,
) -> TemplateProbe | None:
    """Asks the chat template of a folder; None where there is none, or it is not used.

    load            loads the tokenizer; called where the template seems to refuse something
    loss_mask_type  of supervised training on conversations; None: the rows are prompts
    """
    is_sft = loss_mask_type is not None
    if not files.templates or not (is_sft or columns.apply_chat_template):
        return None

    def confirm(messages: Messages, tools: object) -> Exception | None:
        try:
            if loss_mask_type is None:
                left_out = render_prompt(messages, load(), columns, tools).left_out
                return None if left_out is None else FindingError(left_out)
            else:
                from fusionrl.data.supervised import MultiTurnLossMaskGenerator

                masks = MultiTurnLossMaskGenerator(load(), loss_mask_type, columns.chat_template_kwargs)
                masks.get_loss_mask(list(messages), tools)
        except (OSError, ValueError) as error:
            return error
        return None

    return TemplateProbe(files, columns.chat_template_kwargs or {}, confirm, for_answer=not is_sft)


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Texts that a loaded tokenizer reads as one control token."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return tuple(
        sorted({*getattr(tokenizer, "all_special_tokens", ()), *(str(token) for token in added if token.special)})
    )


def placeholder_of(tokenizer: PreTrainedTokenizerBase, columns: PromptColumns) -> str:
    """Return the text of the token that means an image; "" where the rows have none."""
    return "" if columns.images is None else str(tokenizer.convert_ids_to_tokens(columns.images.processor.placeholder))


def _checked_rows(
    path: str | Path, checker: RowChecker, flag: str
) -> Iterator[tuple[str, Row, Sample, list[ImageRef]]]:
    """Yield (place, row, its sample without tokens, its images in the store); ValueError: a row has a mistake."""
    prompt_set = parse_set(path, flag)
    checker.columns = columns = checker.columns.in_set(prompt_set.name)
    checker.data_file, checker.take_image = prompt_set.path, IMAGES.add_file
    for place, row in read_rows(path, flag):
        where = f"{flag} {path}: {place}"
        if problem := checker.error(row):
            raise ValueError(f"{where}: {problem}")
        label, seen = row.get(columns.label_key) if columns.label_key else None, checker.seen
        assert seen is not None
        prompt = seen.prompt if isinstance(seen.prompt, str | list) else ""  # none: the row holds tokens
        sample = Sample(prompt=prompt, label=label, metadata=checker.metadata, adapter=checker.adapter)
        yield where, row, sample, seen.images


def load_conversations(path: str | Path, columns: PromptColumns, flag: str = "--prompt-data") -> PromptDataset:
    """Read rows for supervised training: the prompt stays a list of messages, or text with its response as label.

    A row that holds tokens and their loss mask becomes a sample that has both.

    Raises ValueError: a malformed row, with its line number.
    """
    from fusionrl.data.supervised import token_sample, with_images

    samples: list[Sample] = []
    for where, row, sample, images in _checked_rows(path, RowChecker(columns, is_sft=True), flag):
        if holds_tokens(row):
            tokenized = token_sample(row, sample.prompt)
            try:
                if columns.images is not None:
                    tokenized = with_images(tokenized, images, columns.images.processor.placeholder)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            tokenized.label, tokenized.metadata, tokenized.adapter = sample.label, sample.metadata, sample.adapter
            sample = tokenized
        else:
            set_images(sample, images)
        samples.append(sample)
    if not samples:
        raise ValueError(f"{flag} {path}: it has no rows")
    return PromptDataset(samples)


def load_prompts(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, columns: PromptColumns, flag: str = "--prompt-data"
) -> PromptDataset:
    """Read, render and tokenize every prompt of a file; with `keeps_messages` messages stay as they are, uncounted.

    Raises ValueError: a malformed row (with its line number), or no prompt left under the length limit.
    """
    found = PromptDataset([])
    checker = RowChecker(
        columns, special_tokens=special_tokens_of(tokenizer), placeholder=placeholder_of(tokenizer, columns)
    )
    for where, _, sample, images in _checked_rows(path, checker, flag):
        if columns.keeps_messages and not columns.apply_chat_template and isinstance(sample.prompt, list):
            set_images(sample, images)
            found.samples.append(sample)
            continue
        try:
            fits = _tokenize(sample, images, tokenizer, columns, checker.tools)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if fits:
            found.samples.append(sample)
        else:
            found.num_too_long += 1
    if not found.samples:
        raise ValueError(f"{flag} {path}: no prompt is left ({found.num_too_long} are over --rollout-max-prompt-len)")
    return found


def _tokenize(
    sample: Sample, images: list[ImageRef], tokenizer: PreTrainedTokenizerBase, columns: PromptColumns, tools: object
) -> bool:
    """Render and tokenize the prompt of a sample; return False, the sample as it was, where it is too long."""
    prompt = sample.prompt
    text = render_prompt(prompt, tokenizer, columns, tools).text
    if is_surely_too_long(text, columns.max_prompt_len):
        return False
    ids, spans = prompt_ids(text, images, tokenizer, columns)
    if columns.max_prompt_len is not None and len(ids) > columns.max_prompt_len:
        return False
    if columns.apply_chat_template:
        sample.messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    sample.prompt, sample.prompt_tokens, sample.image_spans = text, ids, spans
    return True


def prompt_ids(
    text: str, images: Sequence[ImageRef], tokenizer: PreTrainedTokenizerBase, columns: PromptColumns
) -> tuple[np.ndarray, Sequence[ImageSpan]]:
    """Return the ids of a rendered prompt, expanded, and the spans of its images.

    Raises FindingError: the text has another number of placeholders than there are images.
    """
    ids = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
    if columns.images is None:
        return ids, ()
    placeholder = columns.images.processor.placeholder
    try:
        whole = expanded(ids, images, placeholder)
        return whole.ids, whole.spans
    except ValueError as error:
        name = placeholder_of(tokenizer, columns)
        cause = f"the chat template does not write one {name} for each image"
        raise FindingError(Finding(cause, str(error), "take the template that came with the model")) from error


def is_surely_too_long(text: str, max_prompt_len: int | None) -> bool:
    """Return whether a text exceeds the limit of tokens by its characters alone: counting tokens could take minutes.

    Raises ValueError: without a limit, the text has more characters than are counted.
    """
    if max_prompt_len is not None:
        return len(text) > min(MAX_PROMPT_CHARACTERS, MAX_TOKEN_CHARACTERS * max_prompt_len)
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ValueError(
            f"the rendered prompt has {len(text):,} characters, over the limit of {MAX_PROMPT_CHARACTERS:,}; shorten"
            " it, or let --rollout-max-prompt-len leave such prompts out"
        )
    return False


def render_prompt(
    prompt: str | Messages, tokenizer: PreTrainedTokenizerBase, columns: PromptColumns, tools: object = None
) -> Rendered:
    """Render a prompt by the chat template when asked, or take it as it stands.

    Raises ValueError: a list of messages without --apply-chat-template, a tokenizer without a template, or a template
    that refuses the messages, or leaves out more of them than a prompt may lose.
    """
    if not columns.apply_chat_template:
        if not isinstance(prompt, str):
            raise ValueError("the prompt is a list of messages: add --apply-chat-template")
        return Rendered(prompt, [], None)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    # A user's function may put tools into the prompt itself: it has them in the sample's metadata.
    may_lose = CONTEXT | {TOOLS} if columns.keeps_messages else CONTEXT
    kwargs = columns.chat_template_kwargs
    return render_messages(tokenizer, messages, tools, for_answer=True, template_kwargs=kwargs, may_lose=may_lose)


class PromptSequence:
    """The prompts of one set, without end; `seed` and epoch shuffle them, None leaves them as they stand."""

    def __init__(self, prompts: Sequence[Sample], seed: Sequence[int] | None) -> None:
        self.prompts = prompts
        self.num_drawn = 0
        self._seed = seed
        self._order_epoch = -1
        self._order = np.arange(len(prompts))

    def draw(self) -> Sample:
        """The next prompt itself, not a copy."""
        epoch, offset = divmod(self.num_drawn, len(self.prompts))
        if self._seed is not None and epoch != self._order_epoch:
            seed, *stream = self._seed
            self._order = np.random.default_rng([seed, epoch, *stream]).permutation(len(self.prompts))
            self._order_epoch = epoch
        self.num_drawn += 1
        return self.prompts[self._order[offset]]


class Mixture:
    """Several sequences in the proportions of their weights.

    Drawn is the set that is furthest behind: of n draws, set k with share w_k is due w_k n, and the next draw goes to
    the greatest w_k (n + 1) - drawn_k. No set gets one draw or more beyond its due, and over a span in which all w_k n
    are whole, each gets exactly that. Exact fractions, so that rounding never decides.
    """

    def __init__(self, sequences: Sequence[PromptSequence], weights: Sequence[float] | None = None) -> None:
        """`weights` need not add up to one. Without them a set counts as much as it has prompts."""
        exact = [Fraction(str(w)) for w in weights or [len(sequence.prompts) for sequence in sequences]]
        assert len(exact) == len(sequences) and min(exact) > 0
        self.sequences = sequences
        self.shares = [weight / sum(exact) for weight in exact]

    def draw(self) -> Sample:
        """The next prompt itself, not a copy."""
        number = 1 + sum(sequence.num_drawn for sequence in self.sequences)
        behind = [
            share * number - sequence.num_drawn for share, sequence in zip(self.shares, self.sequences, strict=True)
        ]
        return self.sequences[behind.index(max(behind))].draw()
