"""What a checkpoint's files must hold by its config.json: block-wise fp8, MXFP4, and the tensors' shapes. Pure."""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from fusionrl.models import families
from fusionrl.models.hf_folder import Place, StoredTensor, places, stored_tensors, text_config
from fusionrl.models.rules import HfConfig, Sizes
from fusionrl.models.shape import ModelShape, read_json_object, read_text_config, shape_from_hf_config
from fusionrl.models.vision import NAMES

SCALE = "_scale_inv"
"""Ending of the name of a weight's scales, as DeepSeek-V3's checkpoints began it."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of a stack's values and scales in MXFP4 (`convert.dequantize_mxfp4`)."""
_CURE = "give the bf16 checkpoint, or one in block-wise fp8 (quant_method fp8 with weight_block_size)"


def is_mxfp4(raw: HfConfig) -> bool:
    """Return whether a folder's config.json says that its experts are in MXFP4."""
    quantization = raw.get("quantization_config")
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"


def mxfp4_sizes(sizes: Sizes) -> tuple[Sizes, Sizes]:
    """Sizes of the values and of the scales of a stack of `sizes` [experts, in, out]."""
    experts, columns, rows = sizes
    return (experts, rows, columns // 32, 16), (experts, rows, columns // 32)


def as_stored(expected: Mapping[str, Sizes], stored: Container[str]) -> dict[str, Sizes]:
    """`expected`, name → sizes, with what is `stored` in MXFP4 under the names and sizes that it is stored in."""
    names: dict[str, Sizes] = {}
    for name, sizes in expected.items():
        if name + BLOCKS in stored:
            names[name + BLOCKS], names[name + SCALES] = mxfp4_sizes(sizes)
        else:
            names[name] = sizes
    return names


@dataclass(frozen=True)
class BlockFp8:
    """Block-wise fp8 (DeepSeek-V3, arXiv:2412.19437, 3.3): a float8_e4m3fn value times its block's scale.

    block  rows and columns that share one scale
    ue8m0  whether scales are powers of two
    names  the weights that are kept so; for each the checkpoint has scales under the same name with `SCALE`
    """

    block: tuple[int, int]
    ue8m0: bool
    names: frozenset[str]

    def scale_shape(self, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Blocks of a weight of `sizes` [rows, columns]; those at its end may be smaller."""
        rows, columns = sizes
        return -(-rows // self.block[0]), -(-columns // self.block[1])


def read_quantization(folder: str | Path, flag: str = "--hf-checkpoint") -> BlockFp8 | None:
    """The quantisation in which the model in `folder` is pushed; None: in none, as one in MXFP4.

    Which weights are quantised is what its files have scales of: `modules_to_not_convert` (`ignored_layers`) says the
    same, and is only checked.
    """
    text = read_text_config(folder, flag)
    quantization = text.get("quantization_config")
    if not quantization or is_mxfp4(text):
        return None
    where = f"{flag} {folder}: its config.json has a quantization_config with"
    block = _checked_block(quantization, where)
    names = places(stored_tensors(folder, flag), text)
    quantized = frozenset(name for name in names if name + SCALE in names)
    if not quantized:
        raise ValueError(f"{where} quant_method fp8, but none of its tensors has scales (…{SCALE}); {_CURE}")
    for name in sorted(quantized):
        module = f".{name.removesuffix('.weight')}."
        entry = next((entry for entry in _unconverted(quantization) if f".{entry}." in module), None)
        if entry is not None:
            raise ValueError(f"{where} {entry} left unquantised, but its files have {name + SCALE}; fetch it again")
    return BlockFp8(block, quantization.get("scale_fmt") == "ue8m0", quantized)


def read_described(
    path: str | Path, flag: str = "--hf-checkpoint", *, sees: bool = False
) -> tuple[ModelShape, BlockFp8 | None]:
    """The shape of a Hugging Face folder, or of its config.json alone, and the quantisation that it describes.

    `sees`: with its vision tower. Quantised are the projections of the layers, as in DeepSeek-V3's and Qwen3's fp8
    checkpoints; routers, norms, embedding and output layer are not. The files themselves may say otherwise:
    `read_quantization`.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"{flag} {path}: config.json is missing; give one, or a folder that has one")
    raw = read_json_object(file, f"{flag} {path}: it")
    shape = shape_from_hf_config(raw, f"{flag} {path}", sees=sees)
    quantization = text_config(raw).get("quantization_config")
    if not isinstance(quantization, Mapping) or not quantization or is_mxfp4(raw):
        return shape, None
    block = _checked_block(quantization, f"{flag} {path}: its config.json has a quantization_config with")
    ignored = _unconverted(quantization)
    names = frozenset(
        name
        for name, sizes in families.hf_shapes(shape).items()
        if len(sizes) == 2
        and _PROJECTION.search(name)
        and not name.startswith(NAMES)
        and not any(f".{entry}." in f".{name}" for entry in ignored)
    )
    return shape, BlockFp8(block, quantization.get("scale_fmt") == "ue8m0", names)


_PROJECTION = re.compile(r"_proj|\.experts\.\d+\.w[123]\.")


def _unconverted(quantization: HfConfig) -> list[str]:
    return quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or []


def _checked_block(quantization: HfConfig, where: str) -> tuple[int, int]:
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8":
        raise ValueError(f"{where} quant_method {method!r}, which weights cannot be pushed in; {_CURE}")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ValueError(f"{where} quant_method fp8 and weight_block_size {block!r}: not block-wise; {_CURE}")
    for key, allowed in (
        ("activation_scheme", ("dynamic",)),
        ("fmt", ("e4m3", "float8_e4m3fn")),
        ("scale_fmt", ("ue8m0", "float")),
    ):
        value = quantization.get(key)
        if value is not None and value not in allowed:
            raise ValueError(f"{where} {key} {value!r}; supported is {' or '.join(allowed)}; {_CURE}")
    return block[0], block[1]


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
        expected |= {n + SCALE: quantization.scale_shape(expected[n]) for n in expected if n in quantization.names}
    where = places(stored, raw)
    found = {name: where.get(name, Place(name)) for name in expected}
    for name, place in found.items():
        if place.may_turn and place.name in stored:
            found[name] = place.turned(expected[name], stored[place.name].sizes)
    expected = as_stored({place.name: place.whole(expected[name]) for name, place in found.items()}, stored)
    has_other = raw.get("quantization_config") and quantization is None and not is_mxfp4(raw)
    packed = _packed(stored) if has_other else set()
    wrong = _wrong_shapes(flag, raw, {n: sizes for n, sizes in expected.items() if n not in packed}, stored)
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
    flag: str, raw: Mapping[str, object], expected: Mapping[str, Sizes], stored: Mapping[str, StoredTensor]
) -> list[str]:
    errors: list[str] = []
    seen: set[tuple[Sizes, Sizes]] = set()  # sizes that a message has named: (by config.json, in the files)
    for name, sizes in expected.items():
        in_file = stored.get(name)
        if in_file is None or in_file.sizes == sizes:
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


def _packed(stored: Mapping[str, StoredTensor]) -> set[str]:
    """Return the tensors that may be packed, in a checkpoint whose quantisation only engines read.

    Such a tensor is stored as integers, or keeps scales or state in other tensors (`…weight_scale`, `…weight.absmax`),
    and then its sizes are the method's. fp8 values keep the sizes of the weight.
    """
    parts = (name.partition(".weight") for name in stored)
    described = {f"{module}.weight" for module, _, rest in parts if rest.startswith(("_", "."))}
    integers = {name for name, tensor in stored.items() if tensor.dtype.startswith(("I", "U"))}
    return {name for name in (described & stored.keys()) | integers if not stored[name].dtype.startswith("F8")}


def _first(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"


def _model(shape: ModelShape) -> str:
    """Describe the model that config.json describes, by the sizes that decide which tensors there are."""
    tied = "tied" if shape.tie_word_embeddings else "untied"
    experts = f", {shape.num_experts} experts" if shape.num_experts else ""
    return f"config.json describes a {shape.model_type} of {shape.num_layers} layers{experts}, with {tied} embeddings"
