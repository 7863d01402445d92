"""Values that a flag takes."""

import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt

from fusionrl.config.config import FIELDS, inner_type


def values_of(field: str, folder: Path) -> list[Any]:
    """Values of the field, one that is not its default where there is one, and every choice."""
    info = FIELDS[field]
    kind, plain = inner_type(info), info.get_default(call_default_factory=True)
    if field == "custom_config_path":
        (folder / "own.yaml").write_text("mine: 1\n")
        return [str(folder / "own.yaml")]
    if field == "engine_group":
        return [["a:num_gpus=2,per_engine=2", "b:num_gpus=1,log-level=error"]]
    if field == "lora_adapters":
        return [["a", "b=./a folder"]]
    if kind is bool:
        return [not plain]
    if typing.get_origin(kind) is typing.Literal:
        return sorted(typing.get_args(kind), key=lambda choice: choice == plain)
    if typing.get_origin(kind) is dict:
        return [{"a": [1, "b"], "deep": {"on": True, "text": "true", "rate": 1e-6}}]
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        return [[item(3), item(4)] if item is not str else ["a", "b: c", "no", "1e-6"]]
    if kind is str:
        return ["./folder/with # {rollout_id}: no.jsonl" if field != "name" else "no"]
    low = max((m.ge if isinstance(m, Ge) else m.gt for m in info.metadata if isinstance(m, (Ge, Gt))), default=0)
    return [low + 1 if kind is int else low + 0.375]  # a float that every upper bound here leaves room for
