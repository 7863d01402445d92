"""Folders of PEFT with an adapter: adapter_config.json, and names and sizes in adapter_model.safetensors. Pure.

PEFT names each adapter by its Hugging Face module, and so do we; any setting that is not plain LoRA is refused by name.
Experts have a pair of tensors each, which PEFT (from 0.19 on) and SGLang read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from fusionrl.models import families
from fusionrl.models.hf_folder import StoredTensor, tensors_of, text_name, whole_name
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import PEFT_PREFIX, AdapterSpec, adapter_rules, peft_sizes, spec_difference

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FLAG = "--lora-adapter-path"
_ADAPTERS = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
# Of LoraConfig of PEFT 0.21: what is read here, what the names of the tensors say as well, and what changes nothing
# that a finished adapter computes.
_TAKEN = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "peft_type", "target_modules", "exclude_modules"),
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
        *("lora_dropout", "runtime_config", "megatron_core", "qalora_group_size", "eva_config"),
    }
)
# Initial values of A alone; others (pissa, olora, loftq, …) change the base's weights.
_PLAIN = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}
_CURE = "merge the adapter into its base with PEFT (merge_and_unload) and give the result as --hf-checkpoint"


@dataclass(frozen=True)
class PeftFolder:
    """An adapter in a folder.

    spec    its sizes and modules
    stored  PEFT's name of each tensor, of the text model's modules → the tensor, and its name in the file
    """

    folder: Path
    flag: str
    shape: ModelShape
    spec: AdapterSpec
    stored: Mapping[str, tuple[str, StoredTensor]]

    def check(self, spec: AdapterSpec) -> None:
        """Compare with the adapters that the flags describe. Raises ValueError, with the flags that would fit."""
        if difference := spec_difference(self.spec, spec, self.shape):
            raise ValueError(f"{self.flag} {self.folder}: the adapters there {difference}")


def read_peft(folder: str | Path, shape: ModelShape, flag: str = FLAG) -> PeftFolder:
    """Read what `folder` says of an adapter of a model, from its config and the header of its weights.

    Raises:
        ValueError: names `flag`, the folder, and the field or the tensor that is not plain LoRA of this model.
    """
    path, where = Path(folder), f"{flag} {folder}"
    config = _read_config(path, flag)
    if not (path / WEIGHTS).is_file():
        raise ValueError(f"{where}: it has no {WEIGHTS}; save the adapter with safe_serialization=True")
    form = families.get_family(shape.model_type).published
    stored: dict[str, tuple[str, StoredTensor]] = {}
    for name, tensor in tensors_of(path / WEIGHTS, flag).items():
        match = _ADAPTERS.fullmatch(name)
        if match is None:
            raise ValueError(f"{where}: tensor {name} is not LoRA of a linear layer; {_CURE}")
        module = text_name(match[1], form) if form is not None else match[1]
        stored[f"{PEFT_PREFIX}{module}.lora_{match[2]}.weight"] = name, tensor
    spec = _spec_of(config, _modules(stored), shape, where)
    left = dict(stored)
    for name, sizes in peft_sizes(shape, spec).items():
        if name not in left:
            raise ValueError(f"{where}: {WEIGHTS} has no {name}, but its other half; save the adapter again")
        stored_name, tensor = left.pop(name)
        if tensor.sizes != sizes:
            raise ValueError(
                f"{where}: tensor {stored_name} has shape {tensor.sizes}; by r in {CONFIG} and --hf-checkpoint it is"
                f" {sizes}"
            )
    if left:
        raise ValueError(f"{where}: tensor {next(iter(left))} adapts no linear layer of this {shape.model_type} model")
    return PeftFolder(path, flag, shape, spec, stored)


def _modules(names: Iterable[str]) -> set[str]:
    return {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in names}


def _spec_of(config: Mapping[str, object], modules: set[str], shape: ModelShape, where: str) -> AdapterSpec:
    """Sizes and modules of the adapter; raises ValueError if adapter_config.json has no such."""
    fields = {"rank": config.get("r"), "alpha": config.get("lora_alpha"), "targets": _shortest(modules, shape)}
    try:
        return AdapterSpec.model_validate(fields | {"use_rslora": bool(config.get("use_rslora"))})
    except ValidationError as error:
        (field, *_), value = error.errors()[0]["loc"], error.errors()[0]["input"]
        name = {"rank": "r", "alpha": "lora_alpha"}.get(str(field), field)
        raise ValueError(f"{where}: {name} is {value!r} in {CONFIG}") from error


def _read_config(folder: Path, flag: str) -> Mapping[str, object]:
    """Return adapter_config.json. Raises ValueError if it is not there, or not of plain LoRA."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{flag} {folder}: {CONFIG} cannot be read ({error.strerror}); give a folder of PEFT's"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} {folder}: {CONFIG} is not valid JSON ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ValueError(f"{flag} {folder}: peft_type is {kind!r} in {CONFIG}, not 'LORA'; {_CURE}")
    for name, value in config.items():
        is_plain = value in (None, False, [], {}) or value in _PLAIN.get(name, ())
        if name not in _TAKEN and not is_plain:
            shown = f"{value!r:.80}"
            raise ValueError(f"{flag} {folder}: {name} is {shown} in {CONFIG}, which is not supported; {_CURE}")
    return config


def peft_config(spec: AdapterSpec, shape: ModelShape, base: str) -> dict[str, object]:
    """Return adapter_config.json of a run's adapters on the model `base`.

    PEFT 0.21 joins gate and up of experts in an adapter of twice the rank and alpha, which rsLoRA would scale by √2:
    adapters of experts get the alpha that scales them alike without it.
    """
    rules = adapter_rules(shape, spec).values()
    modules = _modules(peft_sizes(shape, spec))
    names = _shortest(modules, shape) if shape.vision is None else sorted(modules)  # a tower may have a q_proj, too
    has_experts = any(rule.expert is not None for rule in rules)
    alpha = spec.scale * spec.rank if has_experts else spec.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.use_rslora and not has_experts,
        "target_modules": [_whole(name, shape) for name in names],
        "bias": "none",
    }


def peft_name(name: str, shape: ModelShape) -> str:
    """Return the name in a folder of PEFT's for that of an adapter's tensor: with images that of the whole model."""
    return PEFT_PREFIX + _whole(name.removeprefix(PEFT_PREFIX), shape)


def _whole(name: str, shape: ModelShape) -> str:
    form = families.get_family(shape.model_type).published
    return name if shape.vision is None or form is None or "." not in name else whole_name(name, form)


def _shortest(modules: Iterable[str], shape: ModelShape) -> tuple[str, ...]:
    """Return PEFT's names of exactly these modules: `q_proj`, or a whole one where others have none."""
    everywhere = AdapterSpec(rank=1, alpha=1)
    rest = {
        hf.removesuffix(".weight") for rule in families.model_rules(shape).values() for hf in everywhere.targeted(rule)
    } - (chosen := set(modules))
    unsure = {module.rpartition(".")[2] for module in rest}
    leaves = {module: module.rpartition(".")[2] for module in chosen}
    return tuple(sorted({module if leaf in unsure else leaf for module, leaf in leaves.items()}))
