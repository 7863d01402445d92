"""Text of models and data, made safe and short for a terminal or a log. Pure."""

import json
import re

# Control characters (ESC and the 8-bit CSI among them), line and paragraph separators, embeddings and overrides of the
# writing direction, and halves of surrogate pairs, which no encoding can write.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SPOKEN = {"role", "content"}  # a message has one of them, or both


def as_text(value: object) -> str:
    """A prompt, a response or a label as text; of messages each one's role and content on lines of its own."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) and _SPOKEN & part.keys() for part in value):
        return "\n".join(f"{part.get('role', '')}: {part.get('content', '')}" for part in value)
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that JSON does not have, a value that contains itself
        return str(value)


def visible(text: str, keep_lines: bool = False) -> str:
    r"""`text` with every character that could steer a terminal written as Python writes it: \x1b, \r, \u202e.

    keep_lines  line feeds and tabs stay; else they are written as \n and \t, so that the text is one line.
    """
    kept = "\n\t" if keep_lines else ""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in kept else ascii(match[0])[1:-1], text)


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, more of its start than of its end, with a note of how many were cut.

    0 cuts nothing. The note itself is not counted.
    """
    if limit <= 0 or len(text) <= limit:
        return text
    end = limit * 2 // 5
    head, tail = text[: limit - end], text[len(text) - end :]
    return f"{head}[… {len(text) - limit:,} characters cut …]{tail}"


def ending(text: str, limit: int) -> str:
    """The last `limit` characters of `text`, with an ellipsis where there are more."""
    return text if len(text) <= limit else f"…{text[len(text) - limit :]}"
