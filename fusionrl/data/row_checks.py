"""Everything that can be wrong with one row of prompt data, found before anything is started.

An error is what cannot be trained on, or what is surely not meant: a text that no file and no tokenizer can hold, a
label that no answer can equal. A warning is what can be trained on and is often a mistake: a control token of the
tokenizer inside a message (some data sets quote them on purpose), a role that models do not know, a label of null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionrl.base.wording import closest
from fusionrl.data.columns import IMAGE, ImageColumn, PromptColumns, SeenRow, holds_tokens
from fusionrl.data.findings import Finding, FindingError, LabelProblem
from fusionrl.data.render import decoded, tools_of
from fusionrl.data.rows import MAX_DEPTH, read_metadata, read_tools
from fusionrl.data.tokenizer import TemplateProbe, signature

# A million characters are a quarter of a million tokens: more than models read, and a second of tokenizing.
MAX_PROMPT_CHARACTERS = 1_000_000
# No tokenizer has tokens of more characters; longer texts are over a limit of tokens without counting them.
MAX_TOKEN_CHARACTERS = 256
MAX_NAMES = 12
ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function", "observation", "ipython", "model"})
_CONTENTS = (str, list, type(None))
PROMPT_NAMES = ("prompt", "question", "problem", "input", "query", "instruction", "messages", "conversations", "text")
LABEL_NAMES = ("label", "answer", "solution", "ground_truth", "target", "output", "response", "completion")


# A row's label and metadata → why its reward cannot grade with them; None for nothing.
if TYPE_CHECKING:
    from fusionrl.data.image_rows import TakeImage

AskReward = Callable[[object, Mapping[str, object]], LabelProblem | None]


def metadata_and_tools(
    row: Mapping[str, object], columns: PromptColumns
) -> tuple[dict[str, object], list[dict[str, object]] | None]:
    """Return both columns of a row; either may be JSON as text, since a table's column has one type in all its rows.

    Tools are those of --tool-key, or else those of the metadata; both end in the metadata.

    Raises FindingError: another kind of value.
    """
    metadata = read_metadata(row.get(columns.metadata_key), columns.metadata_key)
    if columns.tool_key and (tools := read_tools(row.get(columns.tool_key), columns.tool_key)):
        metadata["tools"] = tools
    return metadata, tools_of(metadata)


@dataclass
class RowChecker:
    """Checks rows of one set.

    key_flag        the flag of the prompt's column: --input-key or its like
    is_sft          rows are conversations, or texts with their responses as labels, to be trained on as they are
    special_tokens  texts of the tokenizer's control tokens, where they are known
    probe           asks the chat template, where there is one and it is used
    vocab_size      of the model, where it is known, for rows that hold tokens
    ask_reward      asks the reward that will grade with the label, where it is a built-in one
    data_file       file of the rows, where relative paths of images begin
    placeholder     text of the token that means an image, where it is known
    take_image      reads an image; None: its size alone
    seen            prompt and images of the row that was checked last; None: something is wrong with its images
    metadata        of the row that was checked last, with its tools
    tools           of it; None: it has none
    adapter         of it; None: the run has one, or none
    """

    columns: PromptColumns
    key_flag: str = "--input-key"
    is_sft: bool = False
    special_tokens: tuple[str, ...] = ()
    probe: TemplateProbe | None = None
    vocab_size: int | None = None
    ask_reward: AskReward | None = None
    data_file: Path = Path()
    placeholder: str = ""
    take_image: TakeImage | None = None
    seen: SeenRow | None = None
    metadata: dict[str, object] = field(default_factory=dict)
    tools: list[dict[str, object]] | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        self.label_flag = self.key_flag.replace("input", "label")
        # A search for two characters is many times faster than one for each of hundreds of tokens.
        self._starts = tuple({token[:2] for token in self.special_tokens})
        self._roles: dict[str, Finding | None] = {}
        self.num_with_images = 0  # rows that have images

    def findings(self, row: Mapping[str, object]) -> list[Finding]:
        """Return the findings of a row; an empty list for a good one."""
        findings: list[Finding] = []
        columns, key = self.columns, self.columns.input_key
        self._check_metadata_and_tools(row, findings)
        tools = self.tools
        self.seen = SeenRow(row.get(key), [])
        if columns.images is not None:
            row = self._check_images(row, columns.images, findings)
        if self.is_sft and holds_tokens(row):  # these are trained on; what else the row says is for people
            from fusionrl.data.supervised import token_finding

            wrong = token_finding(row, self.vocab_size)
            return findings if wrong is None else [*findings, wrong]
        if key not in row:
            findings.append(self._missing(key, row, self.key_flag, PROMPT_NAMES))
        elif isinstance(prompt := row[key], str):
            self._check_text(prompt, tools, findings)
        elif type(prompt) is list and all(type(message) is dict for message in prompt):
            self._check_messages(prompt, tools, findings)
        else:
            findings.append(Finding(f"column {key!r} is neither text nor a list of messages"))
        if columns.label_key is not None:
            self._check_label(columns.label_key, row, findings)
        elif self.is_sft and isinstance(row.get(key), str):
            cause = f"column {key!r} is text: name the column of its response with {self.label_flag}"
            findings.append(Finding(cause))
        if self.ask_reward is not None and all(finding.is_warning for finding in findings):
            reward_findings = self._reward_findings(self.ask_reward, row)
            # A reward that says what is wrong with a null label makes the general warning needless.
            is_null = columns.label_key is not None and row[columns.label_key] is None
            return (reward_findings or findings) if is_null else findings + reward_findings
        return findings

    def error(self, row: Mapping[str, object]) -> str | None:
        """The first thing for which a row cannot be trained on."""
        return next((str(finding) for finding in self.findings(row) if not finding.is_warning), None)

    def _check_images(
        self, row: Mapping[str, object], column: ImageColumn, findings: list[Finding]
    ) -> Mapping[str, object]:
        """Return the row with its images as parts of messages; as it came where it has none, or has a mistake."""
        from fusionrl.data.image_rows import PLACEHOLDERS, header_ref, read_images

        self.seen = None
        try:
            seen = see(row, self.columns, self.is_sft)
        except FindingError as error:
            findings.append(error.finding)
            return row
        self.num_with_images += bool(seen.values)
        messages = seen.prompt if isinstance(seen.prompt, list) else [{"content": seen.prompt}]
        if self.is_sft and holds_tokens(row):
            messages = []  # its texts are for people
        if self.placeholder and any(self.placeholder in text for message in messages for text in _texts(message)):
            cause = f"column {self.columns.input_key!r}: a text holds {self.placeholder}, which means an image"
            findings.append(Finding(cause, hint=f"write {PLACEHOLDERS[IMAGE]} for an image, and nothing else so"))
        seen.images, wrong = read_images(
            seen.values, column, column.folder_of(self.data_file), self.take_image or header_ref
        )
        findings += wrong
        self.seen = None if wrong else seen
        if not (self.is_sft or self.columns.apply_chat_template or self.columns.keeps_messages) and seen.values:
            cause = f"column {self.columns.input_key!r} has images: add --apply-chat-template"
            findings.append(Finding(cause, hint="the template says how the model marks an image"))
        return row if seen.prompt is None else {**row, self.columns.input_key: seen.prompt}

    # ------------------------------------------------------------------------------------------------ columns
    def _missing(self, key: str, row: Mapping[str, object], flag: str, common_names: Sequence[str]) -> Finding:
        return Finding(f"column {key!r} is missing", hint=_columns_hint(self.columns, key, row, flag, common_names))

    def _check_text(self, prompt: str, tools: object, findings: list[Finding]) -> None:
        key = self.columns.input_key
        if not prompt or prompt.isspace():
            findings.append(Finding(f"column {key!r} is empty"))
        elif text_problem(prompt):
            self._check_value(key, prompt, findings)
        else:
            self._check_size(key, len(prompt), findings)
            if self.columns.apply_chat_template and not self.is_sft:
                self._check_special(prompt, findings)
                self._check_template("text", [{"role": "user", "content": prompt}], tools, findings)

    def _check_size(self, key: str, num_characters: int, findings: list[Finding]) -> None:
        if num_characters <= MAX_PROMPT_CHARACTERS or (self.columns.max_prompt_len is not None and not self.is_sft):
            return
        cause = f"column {key!r} has more than {MAX_PROMPT_CHARACTERS:,} characters"
        hint = "" if self.is_sft else "shorten it, or let --rollout-max-prompt-len leave such prompts out"
        findings.append(Finding(cause, f"{num_characters:,}", hint))

    def _check_special(self, text: str, findings: list[Finding]) -> bool:
        for start in self._starts:
            if start in text:
                token = next((token for token in self.special_tokens if token in text), None)
                if token is None:
                    return False
                cause = f"column {self.columns.input_key!r} holds a special token of the tokenizer inside a message"
                hint = "the model reads it as a control token, not as text"
                findings.append(Finding(cause, repr(token), hint, is_warning=True))
                return True
        return False

    def _check_template(
        self,
        shape: Hashable,
        messages: Sequence[Mapping[str, object]],
        tools: object,
        findings: list[Finding],
        is_odd: bool = False,
    ) -> None:
        if self.probe is not None and (error := self.probe.refusal(shape, messages, tools, is_odd)):
            findings.append(column_finding(self.columns.input_key, error))

    def _check_label(self, key: str, row: Mapping[str, object], findings: list[Finding]) -> None:
        if key not in row:
            findings.append(self._missing(key, row, self.label_flag, LABEL_NAMES))
            return
        label, where = row[key], f"column {key!r} ({self.label_flag})"
        if self.is_sft and isinstance(row.get(self.columns.input_key), str):
            if not isinstance(label, str):
                findings.append(Finding(f"{where} must be the response as text in --mode sft"))
            elif not label.strip():
                findings.append(Finding(f"{where} is an empty response; nothing to train on"))
            else:
                self._check_size(key, len(label), findings)
        elif label is None:
            findings.append(Finding(f"{where} is null", hint="most rewards need one", is_warning=True))
        self._check_value(key, label, findings)

    def _check_value(self, key: str, value: object, findings: list[Finding]) -> None:
        if problem := value_problem(value):
            # Nothing but a user's own functions reads metadata, and these may know what NaN means there.
            is_warning = problem[0] == NOT_FINITE and key == self.columns.metadata_key
            findings.append(Finding(f"column {key!r} {problem[0]}", problem[1], is_warning=is_warning))

    def _check_metadata_and_tools(self, row: Mapping[str, object], findings: list[Finding]) -> None:
        columns = self.columns
        self.metadata, self.tools = {}, None
        try:
            self.metadata, self.tools = metadata_and_tools(row, columns)
            if columns.adapters is not None:
                self.adapter = columns.adapters.adapter(row, self.metadata)
        except FindingError as error:
            findings.append(error.finding)
            self.tools = None
            return
        has_column = columns.tool_key is not None and bool(row.get(columns.tool_key))
        others = (
            {name: value for name, value in self.metadata.items() if name != "tools"} if has_column else self.metadata
        )
        self._check_value(columns.metadata_key, others, findings)
        if has_column:
            self._check_value(str(columns.tool_key), self.tools, findings)

    # ------------------------------------------------------------------------------------------------ messages
    def _check_messages(self, messages: Sequence[Mapping[str, object]], tools: object, findings: list[Finding]) -> None:
        """Of messages that are objects: all else about them."""
        key, num_before = self.columns.input_key, len(findings)
        if not messages:
            findings.append(Finding(f"column {key!r} is empty"))
            return
        shape: list[Any] = []
        num_characters, num_said, is_special = 0, 0, False
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if type(role) is not str or type(content) not in _CONTENTS:
                findings.append(Finding(f"column {key!r} is neither text nor a list of messages"))
                return
            if role not in self._roles:
                self._roles[role] = _role_finding(role, key, self.special_tokens)
            if (finding := self._roles[role]) is not None and finding not in findings:
                findings.append(finding)
            self._check_message(message, findings)
            for text in _texts(message):
                num_characters += len(text)
                is_special = is_special or self._check_special(text, findings)
            # A blank text counts as said where the message has more to say than role and content.
            is_blank = not content or (isinstance(content, str) and content.isspace() and len(message) == 2)
            num_said += not is_blank or bool(message.get("tool_calls"))
            shape.append((role, signature(message)))
        if not num_said:
            findings.append(Finding(f"column {key!r} is empty"))
        self._check_size(key, num_characters, findings)
        if self.is_sft:
            self._check_turns(messages, findings)
        elif not self.columns.apply_chat_template:
            if not self.columns.keeps_messages:
                findings.append(Finding(f"column {key!r} is a list of messages: add --apply-chat-template"))
            return
        elif messages[-1]["role"] == "assistant":
            cause = f"column {key!r} ends with the assistant's turn"
            findings.append(Finding(cause, hint="the model then answers a second time", is_warning=True))
        if all(finding.is_warning for finding in findings[num_before:]):
            # Whether a loss mask can be made of a conversation that quotes an end marker depends on where it does.
            self._check_template(tuple(shape), messages, tools, findings, is_odd=is_special and self.is_sft)

    def _check_message(self, message: Mapping[str, object], findings: list[Finding]) -> None:
        key, content, calls = self.columns.input_key, message.get("content"), message.get("tool_calls")
        self._check_value(key, {name: value for name, value in message.items() if name != "role"}, findings)
        if content is None and message["role"] != "assistant":
            findings.append(Finding(f"column {key!r}: a message has no content", f"role {str(message['role'])[:80]!r}"))
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                continue
            if kind == IMAGE and self.columns.images is not None:
                continue
            if not isinstance(kind, str) or kind == "text":
                cause = f"column {key!r}: a part of a message's content is no {{'type': 'text', 'text': …}}"
                findings.append(Finding(cause))
            else:
                cause = f"column {key!r}: a message's content has other parts than text"
                findings.append(Finding(cause, repr(kind[:80]), "only text is trained on", is_warning=True))
            break
        if calls is not None and not _are_calls(calls):
            cause = f"column {key!r}: tool_calls of a message is not a list of {{'function': {{'name': …}}}}"
            findings.append(Finding(cause))
        for call in calls if isinstance(calls, list) and _are_calls(calls) else ():
            text = decoded((call.get("function") or call).get("arguments"))
            if isinstance(text, str):
                cause = f"column {key!r}: arguments of a tool call are text, but not JSON of an object"
                findings.append(Finding(cause, f"{text[:80]!r}"))
                break

    def _check_turns(self, messages: Sequence[Mapping[str, object]], findings: list[Finding]) -> None:
        from fusionrl.data.supervised import is_trained

        key = self.columns.input_key
        try:
            masks = [is_trained(message) for message in messages if message["role"] == "assistant"]
        except FindingError as error:
            findings.append(column_finding(key, error))
            return
        if masks and not any(masks):
            cause = f"column {key!r}: step_loss_mask or weight is 0 on every turn; nothing is left to train on"
            findings.append(Finding(cause))
        elif not masks:
            findings.append(Finding(f"column {key!r} is a conversation without an assistant turn to train on"))

    def _reward_findings(self, ask_reward: AskReward, row: Mapping[str, object]) -> list[Finding]:
        """Return the finding of the built-in reward that will grade with the label; an empty list for none."""
        columns, label_flag = self.columns, self.label_flag
        label = None if columns.label_key is None else row.get(columns.label_key)
        problem = ask_reward(label, self.metadata)
        if problem is None:
            return []
        if problem.is_about_label and columns.label_key is None:
            hint = _columns_hint(columns, "label", row, label_flag, LABEL_NAMES)
            return [Finding(f"no label for {problem.reward}", hint=hint, is_warning=problem.is_warning)]
        of_label, of_metadata = (columns.label_key, label_flag), (columns.metadata_key, "--metadata-key")
        key, flag = of_label if problem.is_about_label else of_metadata
        text = f"column {key!r} ({flag}) does not fit {problem.reward}"
        return [Finding(text, problem.reason, is_warning=problem.is_warning)]


def see(row: Mapping[str, object], columns: PromptColumns, is_sft: bool = False) -> SeenRow:
    """Return the prompt of a row, None for none, and its images.

    Supervised, a text with images and its response are a conversation: a template says how an image is marked.

    Raises FindingError: placeholders and images do not fit together.
    """
    prompt = row.get(columns.input_key)
    if columns.images is None:
        return SeenRow(prompt, [])
    from fusionrl.data.image_rows import listed, seen_row

    if is_sft and holds_tokens(row):  # the placeholders are among the tokens
        return SeenRow(prompt, listed(row.get(columns.images.key)))
    seen, label = seen_row(row, prompt, columns.images.key), row.get(columns.label_key or "")
    if is_sft and seen.values and isinstance(prompt, str) and isinstance(label, str):
        assert isinstance(seen.prompt, list)
        return SeenRow([*seen.prompt, {"role": "assistant", "content": label}], seen.values)
    return seen


def column_finding(key: str, error: Exception) -> Finding:
    """Return a mistake in the messages of a row as one of their column; mistakes of one kind have one cause."""
    finding = error.finding if isinstance(error, FindingError) else Finding(str(error))
    return replace(finding, cause=f"column {key!r}: {finding.cause}")


def _columns_hint(
    columns: PromptColumns, key: str, row: Mapping[str, object], flag: str, common_names: Sequence[str]
) -> str:
    """Return the names of the columns, and the one that was probably meant."""
    names = [name if name.isprintable() else repr(name) for name in row]
    columns_text = ", ".join(name[:80] for name in names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
    hint = f"the columns are {columns_text}" if names else "the row has no columns"
    taken = (columns.input_key, columns.label_key, columns.metadata_key, columns.tool_key)
    free = [name for name in names if name not in taken]
    close = closest(key, free, cutoff=0.75)
    if guess := [*([close] if close else []), *(name for name in common_names if name in free)][:1]:
        hint += f": {flag} {guess[0]}?"
    return hint


def _role_finding(role: str, key: str, special_tokens: Sequence[str]) -> Finding | None:
    cause, role_text = f"column {key!r}: a message's role", repr(role[:80])
    if not role or not role.isprintable() or " " in role or len(role) > 80:
        return Finding(f"{cause} is not one word", role_text)
    if any(token in role for token in special_tokens):
        return Finding(f"{cause} holds a special token of the tokenizer", role_text)
    if role in ROLES:
        return None
    hint = "models know system, user, assistant and tool"
    return Finding(f"{cause} is unusual", role_text, hint, is_warning=True)


def _are_calls(calls: object) -> bool:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return False
    functions = [call.get("function") or call for call in calls]
    return all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions)


def _texts(message: object) -> Iterable[str]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


# ------------------------------------------------------------------------------------------------ values
NOT_FINITE = "holds a number that is not finite"


def text_problem(text: str) -> tuple[str, str] | None:
    """(what is wrong with a text, the detail), or None: it must be UTF-8 and have no NUL, where C programs end it."""
    if "\0" in text:
        return "holds the character NUL", f"at character {text.index(chr(0)):,}"
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return "holds half a character (a lone surrogate)", f"\\u{ord(text[error.start]):04x}"
    return None


def value_problem(value: object) -> tuple[str, str] | None:
    """(what is wrong with a value of a column, the detail), or None: it must be what JSON can hold."""
    if type(value) is str:
        return None if value.isascii() and "\0" not in value else text_problem(value)
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        item, depth = left.pop()
        if item is None or isinstance(item, bool | int):
            continue
        if isinstance(item, str):
            if problem := text_problem(item):
                return problem
        elif isinstance(item, float):
            if not math.isfinite(item):
                return NOT_FINITE, str(item)
        elif depth > MAX_DEPTH:
            return f"has lists and objects more than {MAX_DEPTH} deep", ""
        elif isinstance(item, list | tuple):
            left += [(child, depth + 1) for child in item]
        elif isinstance(item, dict):
            left += [(child, depth + 1) for pair in item.items() for child in pair]
        else:
            return f"holds a value of the kind {type(item).__name__}, which JSON has not; write it as text", ""
    return None
