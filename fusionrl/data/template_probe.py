"""Find the rows that a chat template refuses, without loading the tokenizer and without rendering every row.

A template branches on roles, on keys and on which kinds of values there are, rarely on the words of a text. So rows
are grouped by their shape, and one row of each shape is rendered. A template that refuses it is asked again
through the tokenizer itself, which has the last word; this is slow, and happens only where something is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fusionrl.data.findings import FindingError
from fusionrl.data.render import Messages, render_with
from fusionrl.data.tokenizer_files import TokenizerFiles

if TYPE_CHECKING:
    from jinja2 import Environment

Confirm = Callable[[Messages, object], Exception | None]  # (messages, tools) → why the tokenizer refuses them, or None

# So many shapes are rendered in one set: data whose rows all differ must not make a plan take minutes.
MAX_SHAPES = 1000


@dataclass
class TemplateProbe:
    """Asks a folder's template about shapes of messages.

    confirm     renders by the tokenizer itself
    for_answer  end with the header of the assistant's next turn, as prompts do and whole conversations do not
    """

    files: TokenizerFiles
    kwargs: Mapping[str, object]
    confirm: Confirm
    for_answer: bool = True
    _compiled: dict[str, Any] = field(default_factory=dict)
    _known: dict[Hashable, Exception | None] = field(default_factory=dict)
    _num_odd: int = 0

    def refusal(self, shape: Hashable, messages: Messages, tools: object, is_odd: bool = False) -> Exception | None:
        """Return the reason why the template refuses messages of this shape; None if it takes them.

        is_odd  the words matter, too: ask the tokenizer about these very messages
        """
        if is_odd:
            self._num_odd += 1
            return self.confirm(messages, tools) if self._num_odd <= MAX_SHAPES else None
        key = (shape, signature(tools) if tools else None)
        if key not in self._known and len(self._known) < MAX_SHAPES:
            takes = self._renders(messages, tools)
            self._known[key] = None if takes else self.confirm(messages, tools)
        return self._known.get(key)

    def _renders(self, messages: Messages, tools: object) -> bool:
        if self.files.template(bool(tools)) is None:
            return True  # a missing template is an error of its own
        try:
            render_with(self.render, messages, tools)
        except FindingError:  # the tokenizer itself is asked then, and says why
            return False
        return True

    def render(self, messages: Messages, tools: object) -> str:
        """The text of the messages; raises whatever the template raises."""
        text = self.files.template(bool(tools)) or ""
        variables: dict[str, Any] = {**self.files.named_tokens, **self.kwargs, "messages": messages, "tools": tools}
        if text not in self._compiled:
            self._compiled[text] = _environment().from_string(text)
        return str(self._compiled[text].render(variables, documents=None, add_generation_prompt=self.for_answer))


def signature(value: object) -> Hashable:
    """Kinds of values and keys of objects, down to the leaves; equal for values that differ in their texts alone."""
    if isinstance(value, dict):
        return tuple((key, signature(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return ("list", *dict.fromkeys(signature(item) for item in value))
    return (type(value), not value)


def _environment() -> Environment:
    """As `apply_chat_template` of transformers 5 sets it up; importing transformers takes seconds."""
    import jinja2.ext
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} … {% endgeneration %} marks what the assistant says; here it is rendered like the rest."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
