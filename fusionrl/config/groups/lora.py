"""Adapters in place of training all weights: LoraGroup."""

from typing import Literal

from fusionrl.config import scopes
from fusionrl.config.groups.base import Group, acting, of_training

of_adapters = acting(scopes.TRAINS, scopes.LORA)


class LoraGroup(Group):
    """Adapters (LoRA)"""

    lora_rank: int = of_training(
        0, "Rank of low-rank adapters, which are trained while the weights stay; 0: all weights are trained.", ge=0
    )
    lora_alpha: float = of_adapters(32.0, "What an adapter adds is multiplied by this number / --lora-rank.", gt=0)
    lora_use_rslora: bool = of_adapters(False, "Multiply by --lora-alpha / sqrt(--lora-rank) instead (rsLoRA).")
    lora_dropout: float = of_adapters(0.0, "Dropout of an adapter's input while training.", ge=0, lt=1)
    target_modules: list[str] = of_adapters(
        ["all-linear"],
        "Modules that get an adapter, by Hugging Face's names (q_proj) or Megatron's (linear_qkv); all-linear: each"
        " linear layer of the decoder.",
    )
    exclude_modules: list[str] = of_adapters([], "Modules that get none, by the same names.")
    lora_adapter_path: str | None = of_adapters(None, "PEFT folder with the adapter to start from.")
    lora_init: Literal["kaiming"] = of_adapters("kaiming", "Initial values: A uniform as PEFT's default, B zero.")
    lora_push: Literal["auto", "adapter", "merged"] = acting(scopes.PUSHES, scopes.LORA)(
        "auto",
        "What engines get: the adapter under a name of its version, without a pause, or weights with the adapter added"
        " to them; auto: adapter where the engines can (docs/guides/adapters.md).",
    )
