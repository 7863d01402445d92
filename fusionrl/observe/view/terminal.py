"""One sample in a terminal, its tokens coloured by one of their values. Pure."""

import codecs
import itertools
from collections.abc import Iterator, Mapping, Sequence

from fusionrl.observe.safe_text import visible
from fusionrl.observe.view.packing import Number
from fusionrl.observe.view.vocabulary import Vocabulary

# Name of --by → the column of a sample's row, and its meaning.
COLUMNS = {
    "mask": ("mask", "loss mask: tokens that are not trained on are grey, or between [- and -] without colours"),
    "mismatch": ("gap", "log-prob of the trainer less that of the engine, nats"),
    "entropy": ("entropy", "entropy of the trainer's distribution, nats"),
    "advantage": ("advantage", "advantage"),
    "logprob": ("engine", "log-prob of the engine, nats"),
    "version": ("version", "version of the weights that sampled the token"),
}
# Background colours of the 256 of a terminal, weak to strong, that leave black and white text readable.
_BELOW, _ABOVE = (52, 88, 124, 160), (22, 28, 34, 40)
_KINDS = (24, 58, 54, 94, 23, 89)
_GREY = "38;5;245"
_WORST = 10
_LEAST_MISMATCH = 0.01  # nats of the full colour at least, or the largest rounding of a healthy run would have it


def token_texts(tokens: Sequence[int], vocabulary: Vocabulary | None) -> list[str]:
    """The text that each token adds: a character of several tokens comes with the last one, an unknown token as its
    id."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    for token in tokens:
        piece = vocabulary.bytes_of(token) if vocabulary is not None else None
        texts.append(decoder.decode(b"", True) + f"[{token}]" if piece is None else decoder.decode(piece))
        if piece is None:
            decoder.reset()
    rest = decoder.decode(b"", True)
    return [*texts[:-1], texts[-1] + rest] if texts else []


def column_of(row: Mapping[str, object], name: str) -> list[Number]:
    """A column of a sample's row, a value a token; None for each where the run has none."""
    tokens, value = row.get("tokens"), row.get(name, 1 if name == "mask" else None)
    if isinstance(value, list):
        return value
    return [value if isinstance(value, int | float) else None] * (len(tokens) if isinstance(tokens, list) else 0)


def render_tokens(row: Mapping[str, object], by: str, vocabulary: Vocabulary | None, has_color: bool) -> Iterator[str]:
    """Lines of a sample's response: its tokens, coloured by a name of `COLUMNS`, then those with the largest values."""
    tokens = row.get("tokens")
    if not isinstance(tokens, list):
        yield "this sample has no token ids"
        return
    name, meaning = COLUMNS[by]
    values = column_of(row, name)
    texts = [visible(text, keep_lines=True) for text in token_texts(tokens, vocabulary)]
    yield f"{len(tokens)} tokens by {by}: {meaning}"
    length = row.get("num_tokens")
    if isinstance(length, int) and length > len(tokens):
        yield f"these are the first {len(tokens):,} of {length:,} tokens; the rest is cut"
    if all(value is None for value in values):
        is_of_trainers = by in ("mismatch", "entropy", "advantage")
        source = "trainers write it with --save-token-values" if is_of_trainers else "the rollout has none"
        yield f"no token has a value: {source}"
    styles = _styles(values, by)
    mask = column_of(row, "mask")
    parts = []
    for text, style, trained in zip(texts, styles, mask, strict=True):
        codes = ";".join(code for code in (style, "" if trained else _GREY) if code)
        parts.append(f"\x1b[{codes}m{text}\x1b[0m" if has_color and codes else text)
    if by == "mask" and not has_color:
        runs = itertools.groupby(zip(texts, mask, strict=True), key=lambda pair: bool(pair[1]))
        joined = ((trained, "".join(text for text, _ in run)) for trained, run in runs)
        parts = [text if trained else f"[-{text}-]" for trained, text in joined]
    yield "".join(parts)
    if by != "mask":
        yield from _table(row, texts, values)


def _styles(values: Sequence[Number], by: str) -> list[str]:
    known = [value for value in values if value is not None]
    if by == "mask":
        return [""] * len(values)
    if by == "version":
        kinds = {value: _KINDS[i % len(_KINDS)] for i, value in enumerate(sorted(set(known)))}
        return ["" if value is None else f"48;5;{kinds[value]}" for value in values]
    largest = max((abs(value) for value in known), default=0.0)
    if by == "mismatch":
        largest = max(largest, _LEAST_MISMATCH)
    return [_shade(value, largest) for value in values]


def _shade(value: Number, largest: float) -> str:
    if value is None or not largest or abs(value) < 0.1 * largest:
        return ""
    colors = _ABOVE if value > 0 else _BELOW
    return f"48;5;{colors[min(int(len(colors) * abs(value) / largest), len(colors) - 1)]}"


def _table(row: Mapping[str, object], texts: Sequence[str], values: Sequence[Number]) -> Iterator[str]:
    """The tokens with the largest values, and all that is known of each."""
    places = [i for i, value in enumerate(values) if value is not None]
    places = sorted(places, key=lambda i: -abs(values[i] or 0.0))[:_WORST]
    if not places:
        return
    names = ("engine", "gap", "entropy", "advantage", "version", "mask")
    columns = {name: column_of(row, name) for name in names}
    columns_shown = [name for name in names if any(columns[name][i] is not None for i in places)]
    lines = [["token", *columns_shown, "text"]]
    lines += [[str(i), *(_number(columns[name][i]) for name in columns_shown), repr(texts[i])] for i in places]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns_shown) + 1)]
    for line in lines:
        yield "  " + "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=False)) + f"  {line[-1]}"


def _number(value: Number) -> str:
    return "" if value is None else f"{value:.4g}"
