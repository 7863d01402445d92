"""A Hugging Face folder's tokenizer, and what its files say without the seconds that loading it takes.

Modules that transformers' `AutoTokenizer` imports take a few names of the models' side, for functions that tokenizers
never call, and with these torch's compiler and all that models need: 1.5 s of a core in a process that only reads and
writes text. Torch itself is a second more, and 200 MB. So these imports are left out.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionrl.base.imports import cached_scans, without_collections
from fusionrl.data.findings import FindingError
from fusionrl.data.render import Messages, render_with
from fusionrl.observe.formats import read_object

if TYPE_CHECKING:
    from jinja2 import Environment
    from transformers import PreTrainedTokenizerBase

_ROPE, _CONFIG = "transformers.modeling_rope_utils", "transformers.configuration_utils"
_FACTORY = "transformers.models.auto.auto_factory"
_MIXIN, _MIXIN_USER = "GenerationMixin", "add_generation_mixin_to_remote_model"
# Module of the models' side → functions and classes of it that the importing modules only call.
_CALLED = {
    "transformers.generation.logits_process": ("WatermarkLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"),
    "transformers.modeling_gguf_pytorch_utils": ("load_gguf_checkpoint",),
}
_LEAVING_OUT = threading.RLock()


@functools.cache
def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, once a process."""
    import_auto_tokenizer()
    from transformers import AutoTokenizer

    with torch_left_out():
        return AutoTokenizer.from_pretrained(folder)


def import_auto_tokenizer() -> None:
    """Import `transformers.AutoTokenizer`. Idempotent, and models can be imported as usual before and after it."""
    with without_collections():
        with cached_scans():
            import transformers

        try:
            _import_rope()
            with _called_later(), _light_factory(transformers):
                assert transformers.AutoTokenizer is not None  # asked for, it is imported
        except ImportError:  # a version of transformers that takes other names: it imports all that it wants
            assert transformers.AutoTokenizer is not None


class _LazyTorch(types.ModuleType):
    """Stands in for torch in a module that uses it only inside functions; imports it at the first use."""

    def __getattr__(self, name: str) -> object:
        vars(sys.modules[_ROPE])["torch"] = torch = importlib.import_module("torch")
        return getattr(torch, name)


def _import_rope() -> None:
    """Import what every configuration is made with; it imports torch for the models' functions in it."""
    utils = importlib.import_module("transformers.utils")
    original = vars(utils).get("is_torch_available")
    if "torch" in sys.modules or _ROPE in sys.modules or original is None or not original():
        return
    vars(utils)["is_torch_available"] = lambda: False
    try:
        rope = importlib.import_module(_ROPE)
    finally:
        vars(utils)["is_torch_available"] = original
    vars(rope).update(is_torch_available=original, torch=_LazyTorch("torch"))


@contextmanager
def torch_left_out() -> Iterator[None]:
    """Read a tokenizer within it: the configuration of the model, which is read on the way, has its dtype as a text.

    transformers would import torch for torch's own name of it. Nothing is done where torch is there already. One
    thread at a time: a second one would take the first one's stand-in for the usual function, and leave it there.
    """
    with _LEAVING_OUT:
        configuration = vars(sys.modules[_CONFIG]) if _CONFIG in sys.modules else {}
        original = configuration.get("is_torch_available")
        if "torch" in sys.modules or original is None:
            yield
            return
        configuration["is_torch_available"] = lambda: False
        try:
            yield
        finally:
            configuration["is_torch_available"] = original


@contextmanager
def _called_later() -> Iterator[None]:
    """Replace the modules of `_CALLED` by stand-ins, which import the real ones when they are called."""
    absent = [module for module in _CALLED if module not in sys.modules]
    for module in absent:
        sys.modules[module] = types.ModuleType(module)
        for name in _CALLED[module]:
            setattr(sys.modules[module], name, functools.partial(_call, module, name))
    try:
        yield
    finally:
        for module in absent:
            del sys.modules[module]


def _call(module: str, name: str, *args: object, **kwargs: object) -> object:
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


@contextmanager
def _light_factory(transformers: types.ModuleType) -> Iterator[None]:
    """Import `auto_factory` with a stand-in for the mixin that it puts under model classes of remote code."""
    if _FACTORY in sys.modules:
        yield
        return
    generation = transformers.generation  # a lazy module: it imports a name's file at the first access
    vars(generation)[_MIXIN] = _MixinStandIn
    try:
        yield
    finally:
        del vars(generation)[_MIXIN]
    _complete_when_used(sys.modules[_FACTORY])


class _MixinStandIn:
    """A stand-in for `GenerationMixin` in `auto_factory`, until `_complete_when_used` replaces it."""


def _complete_when_used(factory: types.ModuleType) -> None:
    """Give `auto_factory` the real mixin in the one function that uses it."""
    original = getattr(factory, _MIXIN_USER)

    @functools.wraps(original)
    def completed(*args: object, **kwargs: object) -> object:
        from transformers.generation import GenerationMixin

        setattr(factory, _MIXIN, GenerationMixin)
        return original(*args, **kwargs)

    setattr(factory, _MIXIN_USER, completed)


Confirm = Callable[[Messages, object], Exception | None]  # (messages, tools) → why the tokenizer refuses them, or None

# So many shapes are rendered in one set: data whose rows all differ must not make a plan take minutes.
MAX_SHAPES = 1000


@dataclass
class TemplateProbe:
    """Finds messages that a folder's chat template refuses, without the tokenizer.

    A template branches on roles, on keys and on which kinds of values there are, rarely on the words of a text. So rows
    are grouped by their shape, and one row of each is rendered. A template that refuses it is asked again through the
    tokenizer itself, which has the last word; this is slow, and happens only where something is wrong.

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


_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """Of a Hugging Face folder; what its files do not say is empty.

    templates       name of a chat template → its text; `default` is the one that is used without tools
    named_tokens    `eos_token` and its like → the token's text, as templates see them
    special_tokens  texts of all tokens that a tokenizer writes as one control token
    added_tokens    ids of tokens that are added to the vocabulary → their texts
    """

    templates: Mapping[str, str]
    named_tokens: Mapping[str, str]
    special_tokens: tuple[str, ...]
    added_tokens: Mapping[int, str] = field(default_factory=dict)

    def template(self, has_tools: bool) -> str | None:
        """The template that transformers would choose."""
        return (self.templates.get("tool_use") if has_tools else None) or self.templates.get("default")


def read_tokenizer_files(folder: str | Path) -> TokenizerFiles:
    """Read them; damaged files count as missing, because loading the tokenizer says what is wrong with them."""
    folder = Path(folder)
    config = read_object(folder / "tokenizer_config.json") or {}
    named = (read_object(folder / "special_tokens_map.json") or {}) | config
    tokens = {name: text for name in _NAMED if (text := _text(named.get(name))) is not None}
    special = set(tokens.values())
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = named.get(key)
        listed = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        special |= {text for token in listed if (text := _text(token)) is not None}
    decoder, added = config.get("added_tokens_decoder"), list[tuple[object, object]]()
    if isinstance(decoder, dict):
        added += [(int(number) if str(number).isdecimal() else None, token) for number, token in decoder.items()]
    added += [(token.get("id"), token) for token in _added_tokens(folder / "tokenizer.json") if isinstance(token, dict)]
    texts: dict[int, str] = {}
    for number, token in added:
        if (text := _text(token)) is None:
            continue
        if type(number) is int:
            texts[number] = text
        if isinstance(token, dict) and token.get("special"):
            special.add(text)
    return TokenizerFiles(_templates(folder, config), tokens, tuple(sorted(special)), texts)


def read_end_tokens(folder: str | Path) -> set[int]:
    """Read the tokens that end an answer by `eos_token_id` of a model's files; engines stop at each of them."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        whole = read_object(Path(folder) / name) or {}
        text = whole.get("text_config")  # of a multimodal model
        for part in (whole, text if isinstance(text, dict) else {}):
            value = part.get("eos_token_id")
            ends |= {token for token in (value if isinstance(value, list) else [value]) if type(token) is int}
    return ends


def _templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    template = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(template, str):
        templates["default"] = template
    elif isinstance(template, list):
        templates |= {
            str(entry.get("name")): str(entry.get("template")) for entry in template if isinstance(entry, dict)
        }
    if isinstance(text := (read_object(folder / "chat_template.json") or {}).get("chat_template"), str):
        templates["default"] = text
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        try:
            templates[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
    return templates


def _text(token: object) -> str | None:
    """Files hold a token as its text, or as an object with its text."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _added_tokens(path: Path) -> list[object]:
    """They stand near the start of tokenizer.json, before a vocabulary of megabytes that is not parsed."""
    try:
        text = path.read_text(encoding="utf-8")
        key = text.index('"added_tokens"')
        entries, _ = json.JSONDecoder().raw_decode(text, text.index("[", key))
    except (OSError, ValueError, RecursionError):
        return []
    return entries if isinstance(entries, list) else []
