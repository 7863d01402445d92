"""`fusionrl data check`: everything that is wrong with prompt data, with its place."""

from __future__ import annotations

import hashlib
import json
import statistics
from dataclasses import dataclass, field
from typing import Any

from fusionrl.data.chat import MultiTurnLossMaskGenerator, conversation_to_sample
from fusionrl.data.findings import Finding, Findings
from fusionrl.data.prompts import is_surely_too_long, metadata_and_tools, render_prompt, special_tokens_of
from fusionrl.data.row_checks import AskReward, PromptColumns, RowChecker, template_finding
from fusionrl.data.rows import line_finding, scan_rows
from fusionrl.data.strict_json import Row
from fusionrl.data.token_rows import LOSS_MASK, TOKENS, holds_tokens, prompt_length


@dataclass
class DataCheck:
    """Checks sets one after the other; a prompt that stands twice is found across them, too.

    tokenizer  without it prompts are neither rendered nor counted in tokens
    lengths    prompt tokens of the rows without a mistake, those that are too long included
    """

    columns: PromptColumns
    tokenizer: Any = None
    is_sft: bool = False
    loss_mask_type: str = "auto"
    vocab_size: int | None = None
    ask_reward: AskReward | None = None
    num_rows: int = 0
    lengths: list[int] = field(default_factory=list)
    _seen: dict[bytes, tuple[str, Any]] = field(default_factory=dict)
    _masks: MultiTurnLossMaskGenerator | None = None

    def problems(self, spec: str) -> tuple[list[str], list[str]]:
        """(errors, warnings) of a set: one text a cause, with the number of rows and the first of them."""
        tokens = special_tokens_of(self.tokenizer) if self.tokenizer is not None else ()
        named: dict[str, Any] = {"special_tokens": tokens, "vocab_size": self.vocab_size, "ask_reward": self.ask_reward}
        checker = RowChecker(self.columns, is_sft=self.is_sft, **named)
        findings, unreadable = Findings(), []
        try:
            for place, row in scan_rows(spec, ""):
                findings.num_rows += 1
                if isinstance(row, ValueError):
                    findings.add(place, line_finding(row))
                    continue
                for finding in self._row_findings(row, checker, f"{spec}: {place}"):
                    findings.add(place, finding)
        except ValueError as error:
            unreadable = [str(error).strip()]
        self.num_rows += findings.num_rows
        if not findings.num_rows and not unreadable:
            unreadable = [f"{spec}: it has no rows"]
        errors = [f"{spec}: {text}" for text in findings.errors()] + unreadable
        return errors, [f"{spec}: {text}" for text in findings.warnings()]

    def _row_findings(self, row: Row, checker: RowChecker, where: str) -> list[Finding]:
        found = checker.findings(row)
        if not all(finding.is_warning for finding in found):
            return found
        found += self._duplicate(row, where)
        if self.tokenizer is None:
            return found
        try:
            length = self._prompt_length(row)
        except ValueError as mistake:
            return [*found, template_finding(self.columns.input_key, str(mistake))]
        limit = self.columns.max_prompt_len
        if length is not None:
            self.lengths.append(length)
        if limit is not None and (length is None or length > limit):
            detail = f"{length} tokens" if length is not None else "by its characters alone; tokens were not counted"
            return [*found, Finding(f"the prompt is longer than --rollout-max-prompt-len {limit}", detail)]
        return found

    def _prompt_length(self, row: Row) -> int | None:
        """Tokens of the prompt; None where its characters alone are too many."""
        if self.is_sft and holds_tokens(row):
            return prompt_length(row)
        prompt, tools = row[self.columns.input_key], metadata_and_tools(row, self.columns)[1]
        if not self.is_sft:
            prompt = render_prompt(prompt, self.tokenizer, self.columns, tools)
            if is_surely_too_long(prompt, self.columns.max_prompt_len):
                return None
        elif isinstance(prompt, list):
            if self._masks is None:
                kwargs = self.columns.chat_template_kwargs
                self._masks = MultiTurnLossMaskGenerator(self.tokenizer, self.loss_mask_type, kwargs)
            return conversation_to_sample(prompt, self._masks, tools).prompt_length
        return len(self.tokenizer.encode(prompt, add_special_tokens=False))

    def _duplicate(self, row: Row, where: str) -> list[Finding]:
        prompt, label = row.get(self.columns.input_key), row.get(self.columns.label_key or "")
        asked = [prompt, row.get(self.columns.tool_key or "")]
        if self.is_sft and holds_tokens(row):  # several answers to one prompt are several rows
            asked, label = [row[TOKENS], row[LOSS_MASK]], None
        text = json.dumps(asked, sort_keys=True, default=repr)
        first, other = self._seen.setdefault(hashlib.sha256(text.encode()).digest(), (where, label))
        if first == where:
            return []
        if other == label:
            return [Finding("the same prompt as an earlier row", first, is_warning=True)]
        return [Finding("the same prompt as an earlier row, with another label", first)]

    def summary(self) -> str:
        """Number of rows, and the range of prompt lengths where they are known."""
        text = f"{self.num_rows} rows"
        if self.lengths:
            low, middle, high = min(self.lengths), statistics.median(self.lengths), max(self.lengths)
            text += f", prompt tokens min {low} median {middle:g} max {high}"
        return text
