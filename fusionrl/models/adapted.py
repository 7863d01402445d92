"""Adapters of a run and the base that they belong to, as its checkpoints name them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import isclose
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fusionrl.base.files import sampled_hash
from fusionrl.models.adapters import AdapterSpec, adapter_rules
from fusionrl.models.shape import ModelShape
from fusionrl.models.weight_files import is_megatron_folder, tensor_files, weights_folder


class Adapted(BaseModel):
    """What a checkpoint has in place of weights.

    adapters  sizes and modules
    base      folder of the weights that they are added to
    identity  a hash of the base's weights (`sampled_hash`); None: not all of its files are on this node
    """

    model_config = ConfigDict(frozen=True)

    adapters: AdapterSpec
    base: str
    identity: str | None = None


def saved_in(description: Mapping[str, object]) -> Adapted | None:
    """Return the adapters that a checkpoint's fusionrl.json names; None: it has weights. ValueError: malformed."""
    adapted = description.get("adapted")
    return None if adapted is None else Adapted.model_validate(adapted)


def spec_difference(stored: AdapterSpec, run: AdapterSpec, shape: ModelShape) -> str | None:
    """Return how stored adapters differ from those of the flags, with the flags that would fit; None: they do not."""
    if stored.rank != run.rank:
        return f"have rank {stored.rank}; give --lora-rank {stored.rank}, not {run.rank}"
    if not isclose(stored.scale, run.scale):
        flag = " --lora-use-rslora" if stored.use_rslora else " without --lora-use-rslora" if run.use_rslora else ""
        return f"have another scale; give --lora-alpha {stored.alpha:g}{flag}"
    if adapter_rules(shape, stored).keys() != adapter_rules(shape, run).keys():
        excluded = f" --exclude-modules {' '.join(stored.excluded)}" if stored.excluded else ""
        return f"belong to other modules; give --target-modules {' '.join(stored.targets)}{excluded}"
    return None


def adapted_difference(path: object, saved: Adapted | None, run: Adapted | None, shape: ModelShape) -> str | None:
    """Return why the checkpoint at `path` with `saved` is not one of `run`; None: it is."""
    where = f"checkpoint {path}"
    if saved is None or run is None:
        if saved is run:
            return None
        if saved is None:
            cure = "leave out --lora-rank to resume, or start another run with --megatron-checkpoint of this folder"
            return f"{where}: it has weights and no adapters; {cure}"
        rank = saved.adapters.rank
        return f"{where}: it has adapters and no weights; give --lora-rank {rank} to resume, or merge (fusionrl export)"
    if difference := spec_difference(saved.adapters, run.adapters, shape):
        return f"{where}: its adapters {difference}"
    if saved.identity is not None and run.identity is not None and saved.identity != run.identity:
        cure = "resume with the former"
        return (
            f"{where}: its adapters belong to the weights in {saved.base}, and those in {run.base} are others; {cure}"
        )
    return None


@lru_cache(maxsize=4)
def base_identity(folder: str) -> str | None:
    """Return a hash of the weights in `folder`, Hugging Face's or Megatron's; None: some are not on this node."""
    if is_megatron_folder(folder):
        files = sorted(Path(weights_folder(folder)).glob("*.distcp"))
    else:
        files = sorted(set(tensor_files(folder).values()))
    try:
        return sampled_hash(files)
    except FileNotFoundError:
        return None
