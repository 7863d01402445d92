"""Chat templates and special tokens from a tokenizer's files, without the seconds that loading it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """Of a Hugging Face folder; what its files do not say is empty.

    templates       name of a chat template → its text; `default` is the one that is used without tools
    named_tokens    `eos_token` and its like → the token's text, as templates see them
    special_tokens  texts of all tokens that a tokenizer writes as one control token
    """

    templates: Mapping[str, str]
    named_tokens: Mapping[str, str]
    special_tokens: tuple[str, ...]

    def template(self, has_tools: bool) -> str | None:
        """The template that transformers would choose."""
        return (self.templates.get("tool_use") if has_tools else None) or self.templates.get("default")


def read_tokenizer_files(folder: str | Path) -> TokenizerFiles:
    """Read them; damaged files count as missing, because loading the tokenizer says what is wrong with them."""
    folder = Path(folder)
    config = _object(folder / "tokenizer_config.json")
    named = _object(folder / "special_tokens_map.json") | config
    tokens = {name: text for name in _NAMED if (text := _text(named.get(name))) is not None}
    special = set(tokens.values())
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = named.get(key)
        listed = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        special |= {text for token in listed if (text := _text(token)) is not None}
    decoder = config.get("added_tokens_decoder")
    added = [*(decoder.values() if isinstance(decoder, dict) else []), *_added_tokens(folder / "tokenizer.json")]
    special |= {
        str(token["content"])
        for token in added
        if isinstance(token, dict) and token.get("special") and token.get("content")
    }
    return TokenizerFiles(_templates(folder, config), tokens, tuple(sorted(special - {""})))


def read_end_tokens(folder: str | Path) -> set[int]:
    """Read the tokens that end an answer by `eos_token_id` of a model's files; engines stop at each of them."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _object(Path(folder) / name).get("eos_token_id")
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
    if isinstance(text := _object(folder / "chat_template.json").get("chat_template"), str):
        templates["default"] = text
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        try:
            templates[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
    return templates


def _object(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


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
