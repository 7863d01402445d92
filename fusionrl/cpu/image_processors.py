"""SGLang's image processors on a CPU: without torchvision, and only the one that the model needs.

Qwen's processors of transformers have a part for videos, which needs torchvision. Its builds fit one build of torch
each, and the registries have none for torch's CPU build. Images need no part of it: transformers cuts them with PIL.
"""

from __future__ import annotations

import os
import pkgutil
import types
from collections.abc import Iterator
from typing import Any

from fusionrl.base.cpu_wing import PROCESSOR_VARIABLE
from fusionrl.base.imports import when_imported

PROCESSORS = "sglang.srt.multimodal.processors"
"""SGLang's package with a module for each kind of processor."""
_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


class ImagesAlone:
    """transformers' processor of a model type, but for videos, as far as SGLang's table of processors asks."""

    def __init__(self, model_type: str) -> None:
        self._model_type = model_type

    def from_pretrained(self, *args: object, **kwargs: object) -> object:
        """Load the processor of a folder; the whole one where torchvision is installed."""
        import transformers
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
        from transformers.utils import is_torchvision_available  # `importlib` would find our stand-in

        processor: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES[self._model_type])
        if not is_torchvision_available():
            processor = _without_videos(processor)
        return processor.from_pretrained(*args, **kwargs)


def _without_videos(whole: type) -> type:
    """A subclass whose `__init__` names no part for videos: transformers loads the parts that it names."""

    def __init__(
        self: object,
        image_processor: object = None,
        tokenizer: object = None,
        chat_template: str | None = None,
        **kwargs: object,
    ) -> None:
        whole.__init__(self, image_processor, tokenizer, chat_template=chat_template, **kwargs)  # type: ignore[misc]

    return type(whole.__name__, (whole,), {"__init__": __init__})


def _add_to_table(module: types.ModuleType) -> None:
    for model_type in _MODEL_TYPES:
        module._CUSTOMIZED_MM_PROCESSOR.setdefault(model_type, ImagesAlone(model_type))


def _import_one(module: types.ModuleType) -> None:
    """Let SGLang look for processors in the one module that the environment names: all 55 take 1 s of a core."""

    def iter_modules(path: object, prefix: str = "") -> Iterator[pkgutil.ModuleInfo]:
        wanted = os.environ.get(PROCESSOR_VARIABLE) if prefix == f"{PROCESSORS}." else None
        for info in pkgutil.iter_modules(path, prefix):  # type: ignore[arg-type]
            if not wanted or info.name == prefix + wanted:
                yield info

    vars(module)["pkgutil"] = types.SimpleNamespace(iter_modules=iter_modules)


def register() -> None:
    """Change SGLang's modules as this process, and its forks, import them; call it once."""
    when_imported("sglang.srt.multimodal.customized_mm_processor_utils", _add_to_table)
    when_imported("sglang.srt.managers.multimodal_processor", _import_one)
