"""`fusionrl data check`: everything that is wrong with prompt data, with its place."""

import functools
import hashlib
import json
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from fusionrl.data.findings import Finding, FindingError
from fusionrl.data.image_rows import decoded_ref
from fusionrl.data.images import ImageRef
from fusionrl.data.prompts import (
    check_file,
    is_surely_too_long,
    metadata_and_tools,
    placeholder_of,
    prompt_ids,
    rendered_prompt,
    special_tokens_of,
)
from fusionrl.data.row_checks import AskReward, PromptColumns, RowChecker, column_finding
from fusionrl.data.rows import Row
from fusionrl.data.sample import response_mask
from fusionrl.data.supervised import LOSS_MASK, TOKENS, SupervisedSamples, holds_tokens, token_sample, with_images


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
        try:
            tools = metadata_and_tools(row, columns)[1]
        except FindingError:  # the checker has named it
            tools = None
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
        text, _, _, left_out = rendered_prompt(prompt, self.tokenizer, columns, tools)
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
