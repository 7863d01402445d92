"""Folders of multimodal models as they are published: the text part of config.json and of the files. Pure.

The files have the text model's tensors under longer names, those of a layer's experts perhaps in one, and tensors that
no text model has. A text model's own folder is the simplest case: every tensor stands under its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from fusionrl.models import families
from fusionrl.models.rules import HfConfig, Published, Sizes
from fusionrl.models.vision import VisionShape

_MODEL = "model."
_MODULES = ("modules_to_not_convert", "ignored_layers")  # of a quantization_config


class Place(NamedTuple):
    """Where the files have a tensor of the text model.

    name         of the tensor in the files
    expert       number of the expert, if `name` has the tensors of all; None: it is this one alone
    num_experts  experts that `name` has
    part         place among the tensors that it has of each expert, one over the other
    num_parts    how many these are
    may_turn     `name` may have [in, out] of each expert
    is_turned    it has
    """

    name: str
    expert: int | None = None
    num_experts: int = 1
    part: int = 0
    num_parts: int = 1
    may_turn: bool = False
    is_turned: bool = False

    def whole(self, sizes: Sizes) -> Sizes:
        """Sizes of the tensor in the files, where those of the text model's are `sizes`."""
        if self.expert is None:
            return sizes
        of_expert = (self.num_parts * sizes[0], *sizes[1:])
        return (self.num_experts, *(of_expert[::-1] if self.is_turned else of_expert))

    def own(self, sizes: Sizes) -> Sizes:
        """Sizes of this tensor, where `sizes` are those in the files."""
        return sizes if self.expert is None else (sizes[1] // self.num_parts, *sizes[2:])

    def turned(self, sizes: Sizes, stored: Sizes) -> Place:
        """This place as the files have it, whose tensor is of `stored` sizes and the text model's of `sizes`.

        Raises:
            ValueError: an expert's tensor is square there, so that its sizes do not tell.
        """
        other = self._replace(is_turned=True)
        if not self.may_turn or stored != other.whole(sizes):
            return self
        if stored == self.whole(sizes):
            raise ValueError(
                f"tensor {self.name} is square for each expert: it does not say which dimension is the input"
            )
        return other

    def taken(self, sizes: Sizes, dim: int = 0, part: slice | None = None) -> tuple[int | slice, ...] | None:
        """Return the index into the tensor in the files: of dimension `dim` only `part`, if given. None: take all.

        Where it `is_turned`, the result is the transpose of this tensor.
        """
        whole = [slice(0, size) for size in sizes]
        ranges = [*whole[:dim], whole[dim] if part is None else part, *whole[dim + 1 :]] if sizes else whole
        if self.expert is None:
            return None if ranges == whole else tuple(ranges)
        first = self.part * sizes[0]
        of_expert = (slice(first + ranges[0].start, first + ranges[0].stop), *ranges[1:])
        return (self.expert, *(of_expert[::-1] if self.is_turned else of_expert))


def text_config(raw: HfConfig) -> HfConfig:
    """The text model's config.json: `raw` itself, or made of that of a multimodal model.

    Raises:
        ValueError: a multimodal model's has no text part of its family.
    """
    model_type = raw.get("model_type")
    family = families.PUBLISHED.get(model_type) if isinstance(model_type, str) else None
    if family is None or family.published is None:
        return raw
    form, text = family.published, raw.get("text_config")
    if text is None and "hidden_size" in raw:  # as Qwen2.5-VL was published
        text = {name: value for name, value in raw.items() if name not in ("model_type", "vision_config")}
    if not isinstance(text, Mapping) or text.get("model_type", family.model_type) != family.model_type:
        raise ValueError(f"model_type {model_type!r} needs a text_config whose model_type is {family.model_type!r}")
    own = {"model_type": family.model_type, "architectures": raw.get("architectures")}
    if form.architecture is not None:
        own["architectures"] = [form.architecture]
    above = {name: raw[name] for name in ("tie_word_embeddings", "quantization_config") if name in raw}
    if isinstance(quantization := above.get("quantization_config"), Mapping):
        modules = {name: quantization[name] for name in _MODULES if isinstance(quantization.get(name), list)}
        renamed = {name: [text_name(str(one), form) for one in ones] for name, ones in modules.items()}
        above["quantization_config"] = {**quantization, **renamed}
    return {**text, **above, **own}


def form_of(text: HfConfig) -> Published | None:
    """The form in which the text model of this config.json may be published, if it is known."""
    try:
        return families.get_family(text.get("model_type", "")).published
    except ValueError:
        return None


def text_name(stored: str, form: Published) -> str:
    """The text model's name of a tensor or module that the files call `stored`; others keep theirs."""
    for prefix, own in form.prefixes.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


def whole_name(name: str, form: Published) -> str:
    """The inverse: what the whole model's files call the text model's tensor, or the tower's, `name`."""
    for prefix, own in form.prefixes.items():
        if own and name.startswith(own):
            return prefix + name.removeprefix(own)
    return next((prefix for prefix, own in form.prefixes.items() if not own), "") + name


def vision_of(raw: HfConfig, text: HfConfig) -> VisionShape:
    """The tower of a model, of its config.json and that of its text part.

    Raises:
        ValueError: it has none, or one that is not trained here.
    """
    form = form_of(text)
    if form is None or form.vision is None or not isinstance(raw.get("vision_config"), Mapping):
        names = ", ".join(name for name, family in families.PUBLISHED.items() if _sees(family))
        raise ValueError(f"a {raw.get('model_type')} model sees no images; models that do are {names}")
    return form.vision(raw, text)


def _sees(family: families.Family) -> bool:
    return family.published is not None and family.published.vision is not None


def places(stored: Iterable[str], text: HfConfig) -> dict[str, Place]:
    """Return the place of each tensor in the files, by the text model's name, or by its own if no text model has it.

    stored  names in the files
    text    the text model's config.json
    """
    form = form_of(text)
    if form is None:
        return {name: Place(name) for name in stored}
    num_experts = int(next((text[name] for name in families.parts.NUM_EXPERTS if text.get(name)), 0))
    return {name: place for one in stored for name, place in _tensors_in(one, form, num_experts)}


def _tensors_in(stored: str, form: Published, num_experts: int) -> Iterator[tuple[str, Place]]:
    """The text model's tensors that one of the files has; itself where it has no other."""
    name = text_name(stored, form)
    layer, _, ending = name.rpartition(".experts.")
    parts = form.packed.get(ending, ()) if layer.startswith((_MODEL, "mtp.")) and num_experts else ()
    if not parts:
        yield name, Place(stored)
    for part, of_expert in enumerate(parts):
        for expert in range(num_experts):
            where = Place(stored, expert, num_experts, part, len(parts), form.may_turn)
            yield f"{layer}.experts.{expert}.{of_expert}", where
