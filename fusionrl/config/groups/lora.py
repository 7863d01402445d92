"""Adapters in place of training all weights: LoraGroup."""

import re
from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from fusionrl.base.wording import BASE
from fusionrl.config import scopes
from fusionrl.config.groups.base import Group, acting, always

of_adapters = acting(scopes.LORA)
of_trained_adapters = acting(scopes.TRAINS, scopes.LORA)
# Of PEFT's init_lora_weights, and of its other kinds of adapters.
_REFUSED = ("pissa", "olora", "corda", "loftq", "eva", "lora_ga", "dora", "vera", "adalora")


class LoraGroup(Group):
    """Adapters (LoRA)"""

    lora_rank: int = always(
        0, "Rank of low-rank adapters, which are trained while the weights stay; 0: all weights are trained.", ge=0
    )
    lora_alpha: float = of_adapters(32.0, "What an adapter adds is multiplied by this number / --lora-rank.", gt=0)
    lora_use_rslora: bool = of_adapters(False, "Multiply by --lora-alpha / sqrt(--lora-rank) instead (rsLoRA).")
    lora_dropout: float = of_trained_adapters(0.0, "Dropout of an adapter's input while training.", ge=0, lt=1)
    target_modules: list[str] = of_adapters(
        ["all-linear"],
        "Modules that get an adapter, by Hugging Face's names (q_proj) or Megatron's (linear_qkv); all-linear: each"
        " linear layer of the decoder.",
    )
    exclude_modules: list[str] = of_adapters([], "Modules that get none, by the same names.")
    lora_adapter_path: str | None = of_adapters(
        None, "PEFT folder with the adapter to start from; where nothing is trained, to serve."
    )
    lora_adapters: list[str] = of_adapters(
        [],
        "Several adapters of this rank on one model, NAME or NAME=FOLDER (a PEFT folder to start from): each row of the"
        " data names its own, and each has its optimizer (docs/guides/adapters.md).",
    )
    adapter_key: str = of_adapters("adapter", "Column, or key of the metadata, that names the adapter of a row.")
    lora_init: Literal["kaiming"] = of_trained_adapters(
        "kaiming", "Initial values: A uniform as PEFT's default, B zero."
    )
    lora_push: Literal["auto", "adapter", "merged"] = acting(scopes.PUSHES, scopes.LORA)(
        "auto",
        "What engines get: the adapter under a name of its version, without a pause, or weights with the adapter added"
        " to them; auto: adapter where the engines can (docs/guides/adapters.md).",
    )

    @field_validator("lora_adapters")
    @classmethod
    def _check_names(cls, specs: list[str]) -> list[str]:
        names = [spec.partition("=")[0] for spec in specs]
        for spec, name in zip(specs, names, strict=True):
            if not re.fullmatch(r"\w[\w-]*", name, re.ASCII) or name == BASE or spec.endswith("="):
                raise ValueError(
                    f"{spec}: write NAME or NAME=FOLDER; a name has letters, digits, '_' and '-', and is not {BASE}"
                )
        if doubles := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two adapters have the name {min(doubles)}; rename one")
        return specs

    @field_validator("target_modules", "exclude_modules", mode="before")
    @classmethod
    def _without_commas(cls, value: object) -> object:
        """Take names with commas between them, as other trainers write them."""
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list):
            return value
        return [name for word in words for part in str(word).split(",") if (name := part.strip())]

    @field_validator("lora_init", mode="before")
    @classmethod
    def _is_known(cls, value: object) -> object:
        if str(value).lower() in _REFUSED:
            reason = "only LoRA with zeros in B leaves the model, which engines share, as it is; give kaiming"
            raise PydanticCustomError("lora_init", reason)
        return value
