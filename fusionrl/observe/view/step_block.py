"""The samples of a rollout file, packed for the page: numbers of all, texts and tokens of as many as there is room."""

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from fusionrl.observe import formats
from fusionrl.observe.rollouts import images_of_row, picture_file
from fusionrl.observe.show import Entry, Samples, is_equal

Number = float | int | None


class Packer:
    """Packs JSON text that is added piece by piece: deflate without a header, then base64.

    Base64 has no `<`, so no text of a model can end the element of the page that holds it.
    """

    def __init__(self) -> None:
        self._stream = zlib.compressobj(6, zlib.DEFLATED, -15)
        self._packed = bytearray()

    def add(self, text: bytes) -> None:
        self._packed += self._stream.compress(text)

    def size(self) -> int:
        """Bytes of base64 so far, all that was added counted."""
        self._packed += self._stream.flush(zlib.Z_SYNC_FLUSH)
        return (len(self._packed) + 2) // 3 * 4

    def text(self) -> str:
        """Return the whole in base64; nothing can be added after it."""
        return base64.b64encode(self._packed + self._stream.flush()).decode("ascii")


def pack(value: object) -> str:
    packer = Packer()
    packer.add(to_json(value))
    return packer.text()


def to_json(value: object) -> bytes:
    """`value` as JSON for the page's script; integers of more than 64 bits, which it would round, are texts."""
    try:
        return orjson.dumps(value, default=formats.to_jsonable, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # half a surrogate pair, or an integer of more than 64 bits
        return formats.to_json(_large_as_text(value))


def _large_as_text(value: object) -> object:
    if isinstance(value, dict):
        return {key: _large_as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_large_as_text(item) for item in value]
    return str(value) if isinstance(value, int) and abs(value) >= 2**63 else value


def short(value: object, digits: int = 4) -> Number:
    """Return a number with so many digits; None if it is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return int(value) if isinstance(value, bool) else None
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


def short_all(values: list[Number], digits: int = 4) -> list[Number]:
    """`short` of many numbers, in a tenth of the time: they are formatted and parsed again at once."""
    kinds = set(map(type, values))
    if kinds <= {int, type(None)}:
        return values
    if kinds <= {float, int, type(None)}:
        known = [math.nan if value is None else value for value in values] if None in values else values
        text = ",".join([f"%.{digits}g"] * len(known)) % tuple(known)
        if "inf" not in text:
            numbers: list[Number] = orjson.loads(f"[{text.replace('nan', 'null')}]")
            return numbers
    return [short(value, digits) for value in values]


MOST_TOKENS = 400_000  # of one sample; what comes after them is cut
_MOST_CHARS = 2_000_000  # of a text of one sample
_MOST_JSON = 50_000  # bytes of metadata or messages
_MOST_MISSES = 8  # samples that have no room; what comes after them is not even read


@dataclass(frozen=True)
class StepBlock:
    """A packed file."""

    text: str | None  # in base64; None if even the numbers do not fit
    facts: dict[str, Any]  # what the table of steps shows of it; "kept": samples with texts and tokens
    token_ids: set[int]  # of the kept samples
    prompts: list[tuple[int, int]]  # (number of a prompt, line of the first sample) of each group that is kept


def build_block(samples: Samples, room: int, numbers: dict[str, int]) -> StepBlock:
    """Pack the samples of a file into at most `room` bytes.

    Groups come in the order of `by_interest`, so that what is left out is what is least likely to be looked at.
    `numbers` has the number of each prompt that came before, also in other files; new ones are added.
    """
    entries = samples.entries
    statuses = sorted({entry.status for entry in entries})
    packer = Packer()
    packer.add(b'{"samples":' + to_json(_columns(samples, statuses)) + b',"statuses":' + to_json(statuses))
    packer.add(b',"unreadable":%d,"rows":{' % samples.num_unreadable)
    facts = facts_of(samples)
    if packer.size() > room:
        return StepBlock(None, facts, set(), [])
    num_kept, misses, token_ids, prompts = 0, 0, set[int](), list[tuple[int, int]]()
    pictures: dict[str, str] = {}  # key → data: URI
    for group in by_interest(samples):
        for entry in group if misses < _MOST_MISSES else ():
            line = samples.file.row_at(entry.offset)
            row = page_row(line, samples.trained_row(entry), entry.length)
            images = [str(image["key"]) for image in images_of_row(line)]
            new = {key: uri for key in images if key not in pictures and (uri := _picture(samples, key))}
            prompt = row["prompt"] if isinstance(row["prompt"], str) else to_json(row["prompt"]).decode()
            prompt += "".join(f"\n{key}" for key in images)
            row["prompt_number"] = number = numbers.setdefault(prompt, len(numbers))
            if (number, group[0].line) not in prompts[-1:]:
                prompts.append((number, group[0].line))
            text = to_json(row)
            left = room - packer.size() - 64 - sum(map(len, (*pictures.values(), *new.values())))
            if _most_packed(text, left) > left:
                misses += 1
                continue
            packer.add((b"," if num_kept else b"") + b'"%d":' % entry.line + text)
            num_kept += 1
            pictures |= new
            token_ids.update(_token_ids(row.get("tokens")), _token_ids(row.get("prompt_tokens")))
    packer.add(b'},"images":' + to_json(pictures) + b"}")
    return StepBlock(packer.text(), facts | {"kept": num_kept}, token_ids, prompts)


def _picture(samples: Samples, key: str) -> str | None:
    """Return the small picture of an image as a data: URI; None where the run has none."""
    try:
        content = picture_file(samples.file.path.parent, key).read_bytes()
    except OSError:
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


def _most_packed(text: bytes, left: int) -> int:
    """Return the bytes that `text` takes at most; it is packed on its own only where it could be too much."""
    if len(text) * 4 // 3 <= left:
        return len(text) * 4 // 3
    packer = Packer()
    packer.add(text)
    return packer.size()


def _token_ids(tokens: object) -> list[int]:
    """A list of token ids; [] for anything else."""
    return tokens if isinstance(tokens, list) and set(map(type, tokens)) <= {int} else []


def facts_of(samples: Samples) -> dict[str, Any]:
    """Numbers of a file as a whole, for the table of steps."""
    entries, trained = samples.entries, samples.trained
    rewards = [entry.reward for entry in entries if entry.reward is not None]
    mismatches = [value for row in trained.values() if (value := short(row.get("mismatch"))) is not None]
    return {
        "samples": len(entries),
        "kept": 0,
        "groups": len(samples.groups),
        "equal": sum(is_equal(group) for group in samples.groups.values()),
        "reward": short(sum(rewards) / len(rewards)) if rewards else None,
        "length": short(sum(entry.length for entry in entries) / len(entries)) if entries else None,
        "truncated": sum(entry.status == "truncated" for entry in entries),
        "failed": sum(entry.status in ("failed", "aborted") for entry in entries),
        "mismatch": max(mismatches, default=None),
    }


def by_interest(samples: Samples) -> list[list[Entry]]:
    """Groups, the most telling first: in turn one by worst mismatch, by lowest and highest reward, one that was cut
    off, the next in the file's order."""
    groups = list(samples.groups.values())

    def mismatch(group: list[Entry]) -> float:
        values = (short(samples.trained.get(entry.line, {}).get("mismatch")) for entry in group)
        return max((value for value in values if value is not None), default=0.0)

    def reward(group: list[Entry]) -> float:
        values = [entry.reward for entry in group if entry.reward is not None]
        return sum(values) / len(values) if values else 0.0

    orders = (
        sorted((g for g in groups if mismatch(g)), key=mismatch, reverse=True),
        sorted(groups, key=reward),
        sorted(groups, key=reward, reverse=True),
        [group for group in groups if any(entry.status != "completed" for entry in group)],
        groups,
    )
    ranks: dict[int, tuple[int, int]] = {}
    for number, order in enumerate(orders):
        for rank, group in enumerate(order):
            ranks[id(group)] = min((rank, number), ranks.get(id(group), (rank, number)))
    return sorted(groups, key=lambda group: ranks[id(group)])


def _columns(samples: Samples, statuses: Sequence[str]) -> dict[str, object]:
    """The numbers of all samples, by name in the file's order."""
    entries = samples.entries
    groups = {key: number for number, key in enumerate(samples.groups)}
    codes = {status: code for code, status in enumerate(statuses)}
    columns: dict[str, list[Number]] = {
        "line": [entry.line for entry in entries],
        "index": [entry.index for entry in entries],
        "group": [groups[entry.group] for entry in entries],
        "reward": [short(entry.reward) for entry in entries],
        "length": [entry.length for entry in entries],
        "status": [codes[entry.status] for entry in entries],
    }
    for name in ("trained_reward", "advantage", "mismatch", "num_trained"):
        values = [short(samples.trained.get(entry.line, {}).get(name)) for entry in entries]
        if any(value is not None for value in values):
            columns[name] = values
    return {**columns, "group_names": [str(key)[:100] for key in samples.groups]}


def page_row(row: dict[str, object], trained: dict[str, object], length: int) -> dict[str, object]:
    """Return a sample as the page, and the terminal, show it.

    Columns over the response tokens are lists, or one value that all tokens have; without values they are left out:
    tokens, mask, version, engine (log-prob), gap (log-prob of the trainer less that of the engine), entropy, advantage.
    """
    tokens = _token_ids(row.get("tokens"))
    fields: dict[str, object] = {name: _cut(row.get(name)) for name in ("prompt", "response", "label")}
    fields |= {"num_tokens": length, "is_removed": bool(row.get("remove_sample"))}
    if images := images_of_row(row):
        fields["images"] = [image["key"] for image in images]
    for name in ("messages", "metadata", "reward"):
        if isinstance(value := row.get(name), dict | list) and value:
            fields[name] = value if len(to_json(value)) <= _MOST_JSON else "(too large for this page)"
    if 0 < length <= len(tokens):
        fields["prompt_tokens"] = tokens[: len(tokens) - length][-MOST_TOKENS:]
        fields["tokens"] = tokens[len(tokens) - length :][:MOST_TOKENS]
    engine = _numbers(row.get("rollout_log_probs"), length)
    trainer = _numbers(trained.get("log_probs"), length)
    gap: list[Number] | None = None
    if trainer and engine:
        # The files' decimals are exact as float32: differences of a few units of the last place would else be wrong.
        gaps = np.array(trainer, dtype=np.float32) - np.array(engine, dtype=np.float32)
        gap = short_all(gaps.tolist(), 3)
    columns = {
        "mask": _numbers(row.get("loss_mask"), length),
        "version": _numbers(row.get("weight_versions"), length),
        "engine": engine,
        "gap": gap,
        "entropy": _numbers(trained.get("entropy"), length),
        "advantage": _numbers(trained.get("advantages"), length),
    }
    for name, values in columns.items():
        if values is not None and any(value is not None for value in values):
            numbers = short_all(values[:MOST_TOKENS])
            fields[name] = numbers[0] if numbers.count(numbers[0]) == len(numbers) else numbers
    return fields


def _numbers(values: object, length: int) -> list[Number] | None:
    """A column over `length` tokens; None for anything else."""
    if not isinstance(values, list) or len(values) != length or not length:
        return None
    if set(map(type, values)) <= {int, float, type(None)}:
        return values
    return [value if isinstance(value, int | float) else None for value in values]


def _cut(value: object) -> object:
    if isinstance(value, str) and len(value) > _MOST_CHARS:
        return value[:_MOST_CHARS] + f" [… {len(value) - _MOST_CHARS:,} characters cut …]"
    return value if isinstance(value, str) or len(to_json(value)) <= _MOST_JSON else "(too large for this page)"
