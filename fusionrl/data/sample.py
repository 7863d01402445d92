"""`Sample`: one prompt with one response, under slime's field names, so that hooks written for slime fit."""

from __future__ import annotations

import base64
import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, TypeAlias

import numpy as np

from fusionrl.data.images import ImageSpan, interned, span_problem
from fusionrl.data.sample_fields import (
    DTYPES,
    UNKNOWN_VERSION,
    HookField,
    PrefixCacheInfo,
    SpecInfo,
    names_turns,
    packed,
    read_images,
    read_list,
    read_train_inputs,
    split_versions,
    token_versions,
    write_prompt,
)
from fusionrl.observe.formats import to_jsonable


class Status(str, Enum):
    """Progress of a sample. FAILED: its generation or reward failed; it is reported and not trained on."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


# Annotations inside Sample, where these names are class attributes for hooks.
_Status: TypeAlias = Status
_SpecInfo: TypeAlias = SpecInfo
_PrefixCacheInfo: TypeAlias = PrefixCacheInfo
_PLAIN = frozenset((type(None), bool, int, str))  # values that JSON has, as they are
_UNCHANGING = _PLAIN | {float, Status}
REWARD_LOST = "reward_lost"  # in the metadata: why its reward function gave no reward: "timeout", "crash", "error"
_LOST = (Status.FAILED, Status.ABORTED)
_FINISH_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
COUNTS: dict[str, type[SpecInfo] | type[PrefixCacheInfo]] = {
    "spec_info": SpecInfo,
    "prefix_cache_info": PrefixCacheInfo,
}
_MADE: dict[str, Callable[[], object]] = {"apply_chat_template_kwargs": dict, **COUNTS}  # in place of None
LIST_FIELDS = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")  # lists to a hook, arrays elsewhere
# slime's fields that most samples leave at their defaults, and then leave out of files.
_RARE: dict[str, object] = {
    **dict.fromkeys(("multimodal_inputs", "multimodal_train_inputs", "multimodal_train_input_id")),
    **dict.fromkeys(("rollout_top_p_token_ids", "rollout_top_p_token_offsets")),
    "image_spans": (),
    "adapter": None,
    "apply_chat_template_kwargs": {},
    "non_generation_time": 0.0,
    **{name: kind() for name, kind in COUNTS.items()},
}


def _never_none(make: Callable[[], object]) -> Callable[[dict[str, Any], object], object]:
    return lambda fields, value: make() if value is None else value


@dataclass(eq=False, repr=False)  # arrays have no single truth value to compare by; a sample is equal to itself
class Sample:
    """One sample of a rollout.

    tokens             prompt and response ids, [prompt + response_length]
    loss_mask          [response_length], 1 = trained on; None: all of the response is
    rollout_log_probs  [response_length], the engine's log-prob of each response token (0 where the mask is 0)
    weight_versions    [response_length], weight version that generated each token, of a tool's tokens that of the token
                       before; -1: not known. slime has a list with one text a turn here: a function may append such
                       texts (`rollout.weight_versions` finds their tokens)
                       A hook reads these four as Python lists, as in slime (`read_list`), and may write any sequence
                       of numbers. fusionrl's own code reads `array(name)`.
    teacher_log_probs  [response_length], the teacher's log-prob of each response token, tools' tokens too (--use-opd)
    rollout_routed_experts  [tokens - 1 or tokens, layers, topk], the experts that the engine chose for each token in
                       each of the model's layers (--use-rollout-routing-replay); -1 where that is not known
    temperature        at which the engine sampled: one number, or one for each token (`sample_fields`); trainers
                       score with it. None: --rollout-temperature
    reward             a float, or a dict of floats (then --reward-key chooses); None: not scored yet
    adapter            that samples and learns it, of --lora-adapters; None: the run has one, or none
    image_spans        (place of its first token, the image) of each image among the tokens, ascending. Where the sample
                       has no tokens yet, those of `prompt_tokens`
    """

    Status = Status
    SpecInfo: ClassVar[type[SpecInfo]] = SpecInfo
    PrefixCacheInfo: ClassVar[type[PrefixCacheInfo]] = PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: Sequence[int] | np.ndarray = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: Sequence[int] | np.ndarray | None = None
    rollout_log_probs: Sequence[float] | np.ndarray | None = None
    weight_versions: Sequence[int] | np.ndarray | None = None
    teacher_log_probs: Sequence[float] | np.ndarray | None = None
    rollout_routed_experts: np.ndarray | None = None
    status: _Status = Status.PENDING
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    session_id: str | None = None
    rollout_id: int | None = None  # what the samples of one attempt share, as in slime (`data.train_batch`)
    prompt_tokens: np.ndarray | None = None  # ids of `prompt`, made when the data was read
    messages: list[dict[str, Any]] | None = None  # the prompt before the chat template
    temperature: float | Sequence[float] | np.ndarray | None = None
    baseline_reward: float | None = None  # of the greedy answer to the prompt (--advantage-estimator remax)
    image_spans: Sequence[ImageSpan] = ()
    adapter: str | None = None
    # slime's, for hooks; nothing in fusionrl reads them yet.
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    rollout_top_p_token_ids: Sequence[int] | np.ndarray | None = None
    rollout_top_p_token_offsets: Sequence[int] | np.ndarray | None = None
    non_generation_time: float = 0.0
    spec_info: _SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: _PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def __repr__(self) -> str:
        # Of what is stored: printing a sample makes no lists.
        return f"Sample({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __deepcopy__(self, memo: dict[int, object]) -> Sample:
        # Most values are plain ones, which need no copy: a third of the time that `copy` itself takes.
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(
            {name: v if type(v) in _UNCHANGING else copy.deepcopy(v, memo) for name, v in vars(self).items()}
        )
        return new

    def __copy__(self) -> Sample:
        # With lists and counts of its own: what one sample appends or counts is not the other's.
        new = object.__new__(type(self))
        for name, value in vars(self).items():
            is_own = name in _MADE or (name in LIST_FIELDS and isinstance(value, list))
            new.__dict__[name] = copy.copy(value) if is_own else value
        return new

    @property
    def num_tokens(self) -> int:
        """Number of tokens, of prompt and response."""
        return len(self.__dict__["tokens"])

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return self.num_tokens - self.response_length

    @property
    def effective_response_length(self) -> int | float:
        """Number of response tokens that the mask trains on: the mask's sum, a float for a mask of shares."""
        mask = self.array("loss_mask")
        return self.response_length if mask is None else mask.sum().item()

    def array(self, name: str) -> np.ndarray | None:
        """Return a field as an array, of the dtype that it is packed in; None where it is None. The field stays as is.

        Raises ValueError, TypeError, OverflowError: a value is not a number, or its dtype cannot hold it.
        """
        value = self.__dict__[name]
        if value is None or isinstance(value, np.ndarray):
            return value
        try:
            return packed(name, value)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"sample {self.index}: {error}") from error

    def pack(self) -> None:
        """Undo what a hook's reading did: lists become arrays again; of one without numbers, an error comes later."""
        versions = self.__dict__["weight_versions"]
        if versions is not None and not len(versions):
            self.weight_versions = None
        for name in LIST_FIELDS:
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                self.__dict__[name] = self.array(name)
        if self.image_spans and _is_derived(self.__dict__["multimodal_inputs"], self.image_spans):
            self.multimodal_inputs = None

    def append_response_tokens(
        self,
        args: object = None,
        *,
        tokens: Sequence[int] | np.ndarray | None = None,
        log_probs: Sequence[float] | np.ndarray | None = None,
        trainable: bool = True,
        versions: Sequence[int] | np.ndarray | int | None = None,
        text: str | None = None,
        finish_reason: str | None = None,
        meta_info: Mapping[str, object] | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Extend the response: the one way that keeps tokens, masks, log-probs and versions aligned.

        tokens, log_probs  [n]; log_probs are required when `trainable`; tokens of a tool or an environment
        (`trainable=False`) get mask 0 and log-prob 0.
        versions           of each token, or one for all. Default: what `meta_info` says; without it, of tokens of a
        tool the version of the token before, else -1, not known (after a generate function, `post` fills these in).
        meta_info          what SGLang's /generate answers under this name: its weight versions and, with
        `update_terminal_info`, its finish reason are the defaults of `versions` and `finish_reason`.

        Raises ValueError: trainable tokens without log-probs, or lengths that differ.
        """
        tokens = () if tokens is None else tokens
        count = len(tokens)
        if count and trainable and log_probs is None:
            raise ValueError("trainable response tokens need the log-probs of the engine that sampled them")
        if log_probs is not None and len(log_probs) != count:
            raise ValueError(f"{count} response tokens, but {len(log_probs)} log-probs")
        if meta_info is not None:
            if versions is None:
                versions = token_versions(meta_info, count)
            if finish_reason is None and update_terminal_info:
                finish_reason = _finish_reason(meta_info)
        if versions is None:
            versions = UNKNOWN_VERSION
            before = self.__dict__["weight_versions"]
            if not trainable and before is not None and not names_turns(before) and len(before):
                versions = int(before[-1])
        self.validate()
        try:
            ids, held = packed("tokens", tokens), packed("tokens", self.__dict__["tokens"])
        except (ValueError, OverflowError) as error:
            raise ValueError(f"sample {self.index}: {error}") from error
        mask = (np.ones if trainable else np.zeros)(count, np.int32)
        new_log_probs = (
            np.zeros(count, np.float32) if log_probs is None or not trainable else np.array(log_probs, np.float32)
        )
        new_versions = np.full(count, versions, np.int32)
        self._extend("loss_mask", mask, 1)
        self._extend("rollout_log_probs", new_log_probs, 0)
        self._extend_versions(new_versions)
        self.tokens = np.concatenate([held, ids])
        if count:
            self.teacher_log_probs = None  # the teacher has not seen these tokens: it scores all of them again
            self.rollout_routed_experts = None  # as an engine's last answer has them, for all tokens
        self.response_length += count
        self.response += text or ""
        if meta_info is not None:
            self._add_meta_info(args, meta_info, update_terminal_info)
        if finish_reason is not None:
            self.status = _FINISH_STATUS.get(finish_reason, Status.COMPLETED)

    def update_from_meta_info(self, args: object, meta_info: Mapping[str, object]) -> None:
        """Take over the finish reason and the weight version of what SGLang's /generate answered last (slime's).

        The versions belong to the response's last tokens, as many as the answer had; call it after each turn, when its
        tokens are in the sample. A finish reason that is none of stop, length and abort leaves the status as it is.
        """
        before = np.asarray(split_versions(self.__dict__["weight_versions"])[0], np.int32)
        num_new = self.response_length - len(before)
        if num_new > 0:
            answered = meta_info.get("completion_tokens")
            count = min(num_new, answered) if isinstance(answered, int) else num_new
            unknown = np.full(num_new - count, UNKNOWN_VERSION, np.int32)
            self.weight_versions = np.concatenate([before, unknown, token_versions(meta_info, count)])
        self.status = _FINISH_STATUS.get(_finish_reason(meta_info) or "", self.status)

    def _add_meta_info(self, args: object, meta_info: Mapping[str, object], is_terminal: bool) -> None:
        """Store the experts and the counts that SGLang's /generate answered."""
        size = getattr(args, "routed_experts_size", None)
        experts = meta_info.get("routed_experts")
        if size and isinstance(experts, str) and not meta_info.get("routed_experts_start_len"):
            flat_experts = np.frombuffer(base64.b64decode(experts), np.int32)
            self.rollout_routed_experts = flat_experts.reshape(self.num_tokens - 1, *size).astype(np.int16)
        if is_terminal and "finish_reason" in meta_info:
            self.prefix_cache_info.add(meta_info)
            if getattr(args, "sglang_speculative_algorithm", None):
                self.spec_info.add(meta_info)

    def _extend(self, name: str, new: np.ndarray, default: int) -> None:
        """Extend a field of the response: a hook's list in place, as slime does."""
        held = self.__dict__[name]
        if isinstance(held, list):
            held += new.tolist()
            return
        held = np.full(self.response_length, default, DTYPES[name]) if held is None else packed(name, held)
        self.__dict__[name] = np.concatenate([held, new.astype(held.dtype, copy=False)])

    def _extend_versions(self, new: np.ndarray) -> None:
        """Extend the weight versions of the response, a hook's list in place.

        Texts of turns stay behind them: `rollout.weight_versions` finds the tokens that they are of.
        """
        held, length = self.__dict__["weight_versions"], self.response_length
        known, texts = split_versions(held) if held is None or names_turns(held) else (held, [])
        before = np.asarray(known[:length], np.int32)
        versions = np.concatenate([before, np.full(length - len(before), UNKNOWN_VERSION, np.int32), new])
        if isinstance(held, list):
            held[:] = [*versions.tolist(), *texts]
        else:
            self.weight_versions = versions

    def validate(self) -> None:
        """Check that what runs over the response is as long as the response.

        Raises ValueError: names the sample, the field and both lengths.
        """
        held, length, count = self.__dict__, self.response_length, self.num_tokens
        if length > count:
            raise ValueError(f"sample {self.index}: response_length {length} exceeds its {count} tokens")
        for name in ("loss_mask", "rollout_log_probs", "weight_versions", "teacher_log_probs"):
            value = held[name]
            if value is None or len(value) == length or (name == "weight_versions" and names_turns(value)):
                continue
            cause = ""
            if isinstance(value, list):
                cause = "; if another sample has the same list, each needs a copy: what one appends is in both"
            raise ValueError(f"sample {self.index}: {name} has {len(value)} values for {length} response tokens{cause}")
        experts = self.rollout_routed_experts
        if experts is not None and not count - 1 <= len(experts) <= count:
            raise ValueError(
                f"sample {self.index}: rollout_routed_experts has {len(experts)} values for {count} tokens; give one"
                " for each, but the last may be missing"
            )
        if self.image_spans and count:
            tokens, mask = np.asarray(self.array("tokens")), self.array("loss_mask")
            if problem := span_problem(tokens, self.image_spans, self.prompt_length, mask):
                raise ValueError(f"sample {self.index}: {problem}")

    def get_reward_value(self, args: object) -> Any:
        """Return the reward as a number; of a dict the value of `args.reward_key`, or, as in slime, all of it without.

        Raises ValueError: names the sample: a dict without that key, or no finite number.
        """
        key = getattr(args, "reward_key", None)
        if isinstance(self.reward, dict) and not key:
            return self.reward
        try:
            return reward_value(self.reward, key, "--reward-key")
        except ValueError as error:
            raise ValueError(f"sample {self.index}: {error}") from error

    def to_dict(self) -> dict[str, object]:
        """A dict of plain values that JSON can hold; attributes a hook added are kept."""
        arrays = self.to_row().items()
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in arrays}

    def to_row(self) -> dict[str, object]:
        """As `to_dict`, with what runs over the tokens as arrays: for `json_line`, which writes those quickly."""
        out: dict[str, Any] = {}
        for name, value in stored_fields(self).items():
            if type(value) in _PLAIN:
                out[name] = value
            elif name in COUNTS:
                out[name] = value.to_dict()
            elif name in DTYPES:
                out[name] = np.asarray(value)
            elif name == "multimodal_train_inputs" or (name == "multimodal_inputs" and value.get("images")):
                continue  # pixels are not for JSON; the keys of images are in `image_spans`
            else:  # what hooks put into metadata, rewards and attributes may hold arrays and numpy scalars
                out[name] = to_jsonable(value)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Sample:
        """The inverse of `to_dict`."""
        field_names = {f.name for f in fields(cls)}
        values: dict[str, Any] = dict(data)
        values["status"] = Status(values.get("status", "pending"))
        for name, dtype in DTYPES.items():
            if values.get(name) is not None:
                values[name] = packed(name, values[name]) if name == "loss_mask" else np.asarray(values[name], dtype)
        for name, kind in COUNTS.items():
            if isinstance(values.get(name), dict):
                values[name] = kind.from_dict(values[name])
        if "image_spans" in values:
            values["image_spans"] = [(first, interned(**image)) for first, image in values["image_spans"]]
        sample = cls(**{name: value for name, value in values.items() if name in field_names})
        for name, value in values.items():
            if name not in field_names:
                setattr(sample, name, value)
        return sample


# After the dataclass is made, so that these replace its plain fields.
for _field in (
    *(HookField(name, read=read_list) for name in LIST_FIELDS),
    HookField("multimodal_inputs", read=read_images),
    HookField("multimodal_train_inputs", read=read_train_inputs),
    HookField("prompt", write=write_prompt),
    *(HookField(name, write=_never_none(make)) for name, make in _MADE.items()),
):
    setattr(Sample, _field.name, _field)


def stored_fields(sample: Sample) -> dict[str, Any]:
    """Return what a file stores of a sample: every attribute, without slime's rare fields at their defaults."""

    def is_default(name: str, value: object) -> bool:
        if name == "image_spans":
            return not value
        return name in _RARE and type(value) is type(_RARE[name]) and value == _RARE[name]

    values = {name: value for name, value in vars(sample).items() if not is_default(name, value)}
    if "image_spans" in values and _is_derived(values.get("multimodal_inputs"), sample.image_spans):
        del values["multimodal_inputs"]
    return values


def _is_derived(inputs: object, spans: Sequence[ImageSpan]) -> bool:
    """Return whether `multimodal_inputs` is what is made of the spans when it is read."""
    if not isinstance(inputs, dict) or any(value for name, value in inputs.items() if name != "images"):
        return False
    from fusionrl.data.processor import ref_of

    return [ref_of(image) for image in inputs.get("images") or ()] == [image for _, image in spans]


def is_trained_on(sample: Sample) -> bool:
    """Return whether its status lets its tokens be trained on: it is neither removed, failed nor aborted."""
    return not sample.remove_sample and sample.status not in _LOST


def lacks_reward(sample: Sample) -> bool:
    """Return whether the sample failed or was aborted before it got a reward: then its 0 does not grade an answer."""
    return sample.status in _LOST and (sample.reward is None or is_reward_lost(sample))


def is_reward_lost(sample: Sample) -> bool:
    """Return whether its reward function hung or took its process down."""
    return isinstance(sample.metadata, dict) and REWARD_LOST in sample.metadata


def response_mask(sample: Sample) -> np.ndarray:
    """[response_length] float32: 1 where the token is trained on; all 0 for a removed or failed sample."""
    if not is_trained_on(sample):
        return np.zeros(sample.response_length, np.float32)
    mask = sample.array("loss_mask")
    return np.ones(sample.response_length, np.float32) if mask is None else np.asarray(mask, np.float32)


def trained_amount(sample: Sample) -> float:
    """Return the sum of `response_mask`: the number of tokens that are trained on, and of shares their sum."""
    return float(response_mask(sample).sum())


def _finish_reason(meta_info: Mapping[str, object]) -> str | None:
    reason = meta_info.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    return None if kind is None else str(kind)


def reward_value(reward: object, key: str | None, flag: str) -> float:
    """One number out of a reward that may be a dict.

    Raises ValueError: no reward, a dict without `key`, or no finite number.
    """
    if isinstance(reward, dict):
        if key is None:
            raise ValueError(f"the reward is a dict with the keys {sorted(reward)}; choose one with {flag}")
        if key not in reward:
            raise ValueError(f"{flag} {key}: the reward has only the keys {sorted(reward)}")
        reward = reward[key]
    if isinstance(reward, bool):
        return float(reward)
    if not isinstance(reward, int | float | np.number):
        raise ValueError(f"the reward {reward!r} is no number")
    if not math.isfinite(reward):
        raise ValueError(f"the reward {reward!r} is not finite")
    return float(reward)
