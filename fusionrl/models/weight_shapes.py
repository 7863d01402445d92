"""A checkpoint's config.json against the shapes in the headers of its .safetensors files. Pure; reads headers only."""

from collections.abc import Callable, Mapping
from pathlib import Path

from fusionrl.models import families
from fusionrl.models.families import Sizes
from fusionrl.models.published import Place, places
from fusionrl.models.quantization import SCALE, BlockFp8, as_stored, is_mxfp4
from fusionrl.models.shape import ModelShape, read_text_config
from fusionrl.models.weight_files import StoredTensor, stored_tensors


def shape_errors(
    folder: str | Path,
    shape: ModelShape,
    flag: str = "--hf-checkpoint",
    *,
    quantization: BlockFp8 | None = None,
    is_loaded: bool = False,
) -> list[str]:
    """List where the files disagree with config.json: one message for each size that is wrong, with its first tensor.

    Scales of `quantization` are checked too. `is_loaded`: trainers load the folder, so tensors that it lacks, or that
    the model does not have, are mistakes as well.
    """
    raw, stored = read_text_config(folder, flag), stored_tensors(folder, flag)
    expected = families.hf_shapes(shape)
    optional = {name for rule in families.model_rules(shape).values() if rule.optional for name in rule.hf}
    if quantization is not None:
        expected |= {
            n + SCALE: quantization.scale_shape(expected[n]) for n in tuple(expected) if n in quantization.names
        }
    where = places(stored, raw)
    found = {name: where.get(name, Place(name)) for name in expected}
    for name, place in found.items():
        if place.may_turn and place.name in stored:
            found[name] = place.turned(expected[name], stored[place.name].sizes)
    expected = as_stored({place.name: place.whole(expected[name]) for name, place in found.items()}, stored)
    has_other = raw.get("quantization_config") and quantization is None and not is_mxfp4(raw)
    is_packed = _packed(stored) if has_other else lambda name: False
    wrong = _wrong_shapes(flag, raw, expected, stored, is_packed)
    if wrong or not is_loaded:
        return wrong
    errors = []
    if missing := [name for name in expected if name not in stored and name not in optional]:
        errors.append(f"{flag} {folder}: tensor {_first(missing)} in none of its files; {_model(shape)}")
    ignored, names = families.ignored(shape), {place.name: name for name, place in where.items()}
    unknown = stored.keys() - expected.keys()
    if extra := sorted(name for name in unknown if not ignored.fullmatch(names.get(name, name))):
        errors.append(f"{flag} {folder}: tensor {_first(extra)} no part of the model; {_model(shape)}")
    return errors


def _wrong_shapes(
    flag: str,
    raw: Mapping[str, object],
    expected: Mapping[str, Sizes],
    stored: Mapping[str, StoredTensor],
    is_packed: Callable[[str], bool],
) -> list[str]:
    errors: list[str] = []
    seen: set[tuple[Sizes, Sizes]] = set()  # sizes that a message has named: (by config.json, in the files)
    for name, sizes in expected.items():
        in_file = stored.get(name)
        if in_file is None or in_file.sizes == sizes or is_packed(name):
            continue
        differing = {(sizes, in_file.sizes)}
        if len(sizes) == len(in_file.sizes):
            differing = {((a,), (b,)) for a, b in zip(sizes, in_file.sizes, strict=True) if a != b}
        if differing <= seen:
            continue
        described = {size for (size, *_), _ in differing - seen}
        keys = [key for key, value in raw.items() if type(value) is int and value in described]
        if name.endswith(SCALE):
            keys = []  # its sizes are numbers of blocks
        hint = f" ({', '.join(f'{key} {raw[key]}' for key in keys)})" if 0 < len(keys) <= 3 else ""
        seen |= differing
        errors.append(
            f"{flag} {in_file.file}: tensor {name} has shape {list(in_file.sizes)}, but config.json{hint} describes"
            f" {list(sizes)}; take both from the same model"
        )
    return errors


def _packed(stored: Mapping[str, StoredTensor]) -> Callable[[str], bool]:
    """Return a test for tensors that may be packed, in a checkpoint whose quantisation only engines read.

    Such a tensor is stored as integers, or keeps scales or state in other tensors (`…weight_scale`, `…weight.absmax`),
    and then its sizes are the method's. fp8 values keep the sizes of the weight.
    """
    parts = (name.partition(".weight") for name in stored)
    beside = {f"{module}.weight" for module, _, rest in parts if rest.startswith(("_", "."))}
    return lambda name: (
        not stored[name].dtype.startswith("F8") and (name in beside or stored[name].dtype.startswith(("I", "U")))
    )


def _first(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"


def _model(shape: ModelShape) -> str:
    """Describe the model that config.json describes, by the sizes that decide which tensors there are."""
    tied = "tied" if shape.tie_word_embeddings else "untied"
    experts = f", {shape.num_experts} experts" if shape.num_experts else ""
    return f"config.json describes a {shape.model_type} of {shape.num_layers} layers{experts}, with {tied} embeddings"
