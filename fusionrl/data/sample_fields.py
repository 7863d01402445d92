"""Fields of `Sample` that are more than attributes, and how a response was sampled: temperatures, versions, changes.

Trainers score with `Sample.temperature`. One number applies to the whole response. Turns of several temperatures make
it an array, one number for each token; tokens that were appended after the last turn have the last one. NaN: not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from fusionrl.data.sample import Sample


class HookField:
    """A field that hooks read, or write, in another form than it is stored in; fusionrl's own code reads `vars`.

    read   (the sample's fields, name of this one) → what a hook gets; None: the field as it is stored
    write  (the sample's fields, the value of a hook) → what is stored; None: the value as it is
    """

    def __init__(
        self,
        name: str,
        read: Callable[[dict[str, Any], str], object] | None = None,
        write: Callable[[dict[str, Any], Any], object] | None = None,
    ) -> None:
        self.name, self.read, self.write = name, read, write

    def __get__(self, sample: object | None, owner: type | None = None) -> Any:
        """Return the field."""
        if sample is None:
            return self
        fields = sample.__dict__
        if self.name not in fields:
            raise AttributeError(self.name)
        return fields[self.name] if self.read is None else self.read(fields, self.name)

    def __set__(self, sample: object, value: object) -> None:
        fields = sample.__dict__
        fields[self.name] = value if self.write is None else self.write(fields, value)


def read_list(fields: dict[str, Any], name: str) -> object:
    """Return a list in place of an array, as in slime; it stays in the sample, so that appended values do, too.

    `Sample.pack` makes an array of it again. A list belongs to one sample: `append_response_tokens` extends the lists
    of the response in place, as slime's functions expect that keep one in a variable. Tokens become a new array
    instead, for a hook may have set the prompt's own list.
    """
    if isinstance(fields[name], np.ndarray):
        fields[name] = fields[name].tolist()
    return fields[name]


def read_images(fields: dict[str, Any], name: str) -> object:
    """Return slime's `multimodal_inputs`: of a sample with spans {"images": images of PIL, "videos": None}.

    The dictionary stays in the sample: images that a hook appends are the sample's, too.
    """
    if fields[name] is None and (spans := fields.get("image_spans")):
        from fusionrl.data.processor import image_inputs  # imports PIL

        fields[name] = image_inputs([image for _, image in spans])
    return fields[name]


def read_train_inputs(fields: dict[str, Any], name: str) -> object:
    """Return slime's `multimodal_train_inputs`: {"pixel_values", "image_grid_thw"} of the images, made at each call."""
    if fields[name] is not None or not (spans := fields.get("image_spans")):
        return fields[name]
    from fusionrl.data.processor import train_inputs

    return train_inputs([image for _, image in spans])


def write_prompt(fields: dict[str, Any], prompt: object) -> object:
    """Forget the ids that were made of another prompt when the data was read, and where its images are in them."""
    if fields.get("prompt_tokens") is not None and fields["prompt"] != prompt:
        fields["prompt_tokens"] = None
        if fields.get("image_spans") and not len(fields["tokens"]):
            fields["multimodal_inputs"] = read_images(fields, "multimodal_inputs")
            fields["image_spans"] = ()
    return prompt


# ------------------------------------------------------------------------------------------------ numbers
DTYPES = {
    "tokens": np.int32,
    "loss_mask": np.int32,
    "rollout_log_probs": np.float32,
    "weight_versions": np.int32,
    "teacher_log_probs": np.float32,
    "rollout_routed_experts": np.int16,
    "prompt_tokens": np.int32,
}


LARGEST_LOG_PROB = 1e-3  # log-softmax in bf16 rounds a certain token's log-prob to a little over 0
SMALLEST_LOG_PROB = -1e5  # lower values are not log-probs: exp of their difference to any other overflows


def packed(name: str, value: object) -> np.ndarray:
    """A field's numbers as an array; a mask may hold shares between 0 and 1.

    Raises ValueError: a whole number that its dtype cannot hold. TypeError: it holds something else.
    """
    array = np.asarray(value)
    if array.dtype == DTYPES[name]:
        return array
    if array.dtype.kind not in "iufb" and array.size:
        is_too_long = array.dtype.kind == "O" and all(isinstance(number, int) for number in array.flat)
        if not is_too_long:
            raise TypeError(f"{name} holds a value that is not a number")
    is_share = name == "loss_mask" and array.dtype.kind == "f"
    dtype = np.dtype(np.float32 if is_share else DTYPES[name])
    if dtype.kind == "i" and array.size and array.dtype.kind in "iuO" and array.dtype != dtype:
        least, most = -(1 << 8 * dtype.itemsize - 1), (1 << 8 * dtype.itemsize - 1) - 1
        wrong = next((number for number in (array.max(), array.min()) if not least <= number <= most), None)
        if wrong is not None:
            place = int(np.argmax(array == wrong))
            raise ValueError(f"{name} holds {wrong} at place {place}; it must be within {least}..{most}")
    return array.astype(dtype, copy=False)


# ------------------------------------------------------------------------------------------------ counts
# Names in SGLang's answers: since 0.5.20, and before.
_SPEC_NAMES = {
    "spec_accept_token_num": ("spec_num_correct_drafts", "spec_accept_token_num"),
    "spec_draft_token_num": ("spec_num_proposed_drafts", "spec_draft_token_num"),
}


@dataclass
class _Counts:
    """Whole numbers by name."""

    def to_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Self:
        """Return counts of which some may be missing."""
        return cls(**{field.name: data.get(field.name, 0) for field in fields(cls)})


@dataclass
class SpecInfo(_Counts):
    """Tokens that a draft model proposed (`draft`) and the model took (`accept`), and its looks at them (`verify`)."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Return the share of the proposed tokens that were taken."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Return the mean number of tokens a look."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counts of one answer."""
        for field, names in _SPEC_NAMES.items():
            count = next((meta_info[name] for name in names if name in meta_info), 0)
            setattr(self, field, getattr(self, field) + count)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)


@dataclass
class PrefixCacheInfo(_Counts):
    """Prompt tokens of all requests, and those among them that the engine had computed before."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Return the share of prompt tokens that were computed before."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counts of one answer."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


CHANGED = "sampling_changed"  # in a sample's metadata: sampling parameters that changed the distribution
# SGLang's parameters, with the value that changes nothing. top_p, top_k and min_p cut the tail off, and the engine's
# log-probs are those of the whole distribution; with the others they are those of the changed one.
_UNCHANGED: dict[str, tuple[object, ...]] = {
    "top_p": (1, 1.0),
    "top_k": (-1, 1 << 30),
    "min_p": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_new_tokens": (0,),
    **dict.fromkeys(("logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "watermark"), ("", {})),
}
GREEDY_BELOW = 1e-6  # SGLang takes the likeliest token below it, and gives log-probs of temperature 1


def scored_at(temperature: object) -> float:
    """Return the temperature of an engine's log-probs for a request with `temperature` (SGLang's default: 1).

    Raises ValueError: it is not a finite number of at least 0.
    """
    value = 1.0 if temperature is None else temperature
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value < np.inf:
        raise ValueError(f"the temperature {temperature!r} is not a finite number of at least 0")
    return 1.0 if value < GREEDY_BELOW else float(value)


def changes_of(params: Mapping[str, object]) -> list[str]:
    """Return the names of the sampling parameters by which tokens do not come from the policy's distribution."""
    changed = [
        name for name, neutral in _UNCHANGED.items() if params.get(name) is not None and params[name] not in neutral
    ]
    temperature = params.get("temperature")
    is_greedy = isinstance(temperature, int | float) and temperature < GREEDY_BELOW
    return [*changed, "temperature"] if is_greedy else changed


def note_request(sample: Sample, start: int, params: Mapping[str, object]) -> None:
    """Note that the response tokens of `sample` from `start` on were sampled by a request with `params`."""
    note_temperature(sample, start, params.get("temperature"))
    if changes := changes_of(params):
        note_changes(sample, changes)


def note_changes(sample: Sample, changes: Iterable[str]) -> None:
    """Note in the metadata which sampling parameters changed the distribution of a sample's tokens."""
    known = (sample.metadata or {}).get(CHANGED) or []
    sample.metadata = {**(sample.metadata or {}), CHANGED: sorted({*known, *changes})}


def note_temperature(sample: Sample, start: int, temperature: object) -> None:
    """Note that the response tokens of `sample` from `start` on were sampled by a request with `temperature`."""
    value = scored_at(temperature)
    held: Any = sample.temperature
    if start == 0 or (np.ndim(held) == 0 and held == value):
        sample.temperature = value
        return
    per_token = np.full(sample.response_length, np.nan, np.float32)
    if held is not None:  # tokens of tools stand behind those that were noted: they have the temperature before
        earlier = np.atleast_1d(np.asarray(held, np.float32))
        per_token[: len(earlier)], per_token[len(earlier) : start] = earlier[: len(per_token)], earlier[-1]
    per_token[start:] = value
    sample.temperature = per_token


def temperatures_of(sample: Sample, default: float) -> np.ndarray | None:
    """[response_length] fp32 temperatures of a sample; None where all are `default`, that of unknown tokens.

    Raises ValueError: a temperature is not a positive number; names the sample.
    """
    held: Any = sample.temperature
    if held is None or (np.ndim(held) == 0 and held == default):
        return None
    try:
        known = np.atleast_1d(np.asarray(held, np.float32))
        values = np.full(sample.response_length, known[-1], np.float32)
        values[: len(known)] = known[: len(values)]
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"sample {sample.index}: temperature {held!r:.80}: {error}") from error
    values[np.isnan(values)] = default
    if not ((values > 0) & np.isfinite(values)).all():
        raise ValueError(
            f"sample {sample.index}: temperature {held!r:.80} must be above 0, as log-probs are scored at it"
        )
    return None if (values == np.float32(default)).all() else values


# ------------------------------------------------------------------------------------------------ weight versions
UNKNOWN_VERSION = -1  # in weight_versions: it is not known which weights sampled the token


def names_turns(versions: object) -> bool:
    """Return whether weight versions end as slime's do, with one text for each turn: [] does so, too."""
    return isinstance(versions, list) and (not versions or isinstance(versions[-1], str))


def split_versions(versions: object) -> tuple[Sequence[int] | np.ndarray, list[str]]:
    """Return the versions of tokens, and the texts of turns that a function has appended to them."""
    if not isinstance(versions, list):
        return (np.zeros(0, np.int32) if versions is None else np.asarray(versions)), []
    end = next((place for place, version in enumerate(versions) if isinstance(version, str)), len(versions))
    return versions[:end], versions[end:]


def as_version(version: object) -> int:
    """The pushed version of what an engine says; what it calls a checkpoint that it loaded itself is version 0.

    A version is counted from 0 by the pushes: a longer number is a name, too.
    """
    text = str(version)
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else 0


def token_versions(meta_info: Mapping[str, object], count: int) -> np.ndarray:
    """[count] int32: the weight version of each token of an answer from SGLang's /generate; -1: not given.

    `weight_versions` are spans over the answer's tokens, where weights changed meanwhile; else there is one
    `weight_version`. Tokens that the caller cut off at the end have none.
    """
    versions = np.full(count, UNKNOWN_VERSION, np.int32)
    if "weight_version" in meta_info:
        versions[:] = as_version(meta_info["weight_version"])
    start = 0
    spans = meta_info.get("weight_versions")
    for span in spans if isinstance(spans, list | tuple) else ():
        end = int(span["end"])
        versions[start:end] = as_version(span["version"])
        start = end
    return versions
