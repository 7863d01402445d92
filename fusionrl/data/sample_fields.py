"""Fields of `Sample` that are more than plain attributes, and slime's counts of a sample's requests."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np


class _StoredField:
    """A field that is read and set as it is stored."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, sample: object | None, owner: type | None = None) -> Any:
        """Return the field."""
        if sample is None:
            return self
        try:
            return sample.__dict__[self.name]
        except KeyError:
            raise AttributeError(self.name) from None

    def __set__(self, sample: object, value: object) -> None:
        sample.__dict__[self.name] = value


class ListField(_StoredField):
    """A field that hooks read as a list, as in slime; fusionrl stores an array and reads it with `Sample.array`.

    The list that a hook reads replaces the array, so that appended values stay; `Sample.pack` makes an array of it
    again. A list belongs to one sample: `append_response_tokens` extends the lists of the response in place, as
    slime's functions expect that keep one in a variable. Tokens become a new array instead, for a hook may have set the
    prompt's own list.
    """

    def __get__(self, sample: object | None, owner: type | None = None) -> Any:
        """Return the field; an array becomes a list, which stays in the sample."""
        value = super().__get__(sample, owner)
        if sample is not None and isinstance(value, np.ndarray):
            value = sample.__dict__[self.name] = value.tolist()
        return value


class DefaultField(_StoredField):
    """One of slime's fields, never None: where a hook or a file sets None, it is `make()`."""

    def __init__(self, name: str, make: Callable[[], object]) -> None:
        super().__init__(name)
        self.make = make

    def __set__(self, sample: object, value: object) -> None:
        sample.__dict__[self.name] = self.make() if value is None else value


class PromptField(_StoredField):
    """The prompt: the ids made of it when the data was read are forgotten when a hook writes another one."""

    def __set__(self, sample: object, value: object) -> None:
        attributes = sample.__dict__
        if attributes.get("prompt_tokens") is not None and attributes["prompt"] != value:
            attributes["prompt_tokens"] = None
            if attributes.get("image_spans") and not len(attributes["tokens"]):  # the places are other ones now
                attributes["multimodal_inputs"] = sample.multimodal_inputs  # type: ignore[attr-defined]
                attributes["image_spans"] = ()
        attributes["prompt"] = value


class ImagesField(_StoredField):
    """slime's `multimodal_inputs`: of a sample with `image_spans` {"images": images of PIL, "videos": None}.

    The dictionary stays in the sample once a hook has read it: images that the hook appends are the sample's, too. Its
    images read their pixels at their first use.
    """

    def __get__(self, sample: object | None, owner: type | None = None) -> object:
        """Return the field."""
        value = super().__get__(sample, owner)
        if sample is None or value is not None or not (spans := sample.__dict__.get("image_spans")):
            return value
        from fusionrl.data.stored_image import image_inputs  # imports PIL

        value = sample.__dict__[self.name] = image_inputs([image for _, image in spans])
        return value


class TrainInputsField(_StoredField):
    """slime's `multimodal_train_inputs`: {"pixel_values", "image_grid_thw"} of the images, made when it is read."""

    def __get__(self, sample: object | None, owner: type | None = None) -> object:
        """Return the field."""
        value = super().__get__(sample, owner)
        if sample is None or value is not None or not (spans := sample.__dict__.get("image_spans")):
            return value
        from fusionrl.data.stored_image import train_inputs

        return train_inputs([image for _, image in spans])


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


def packed(name: str, value: object) -> np.ndarray:
    """A field's numbers as an array; a mask may hold shares between 0 and 1.

    Raises:
        ValueError: a whole number that its dtype cannot hold.
        TypeError: it holds something else.
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


def joined(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.concatenate([first, second.astype(first.dtype, copy=False)])


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
