"""The tokenizer of a Hugging Face folder, and its chat template; read without transformers' models and without torch.

Modules that transformers' `AutoTokenizer` imports take a few names of the models' side, for functions that tokenizers
never call, and with these torch's compiler and all that models need: 1.5 s of a core in a process that only reads and
writes text. Torch itself is a second more, and 200 MB.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fusionrl.base.imports import cached_scans, without_collections

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROPE, _CONFIG = "transformers.modeling_rope_utils", "transformers.configuration_utils"
_FACTORY = "transformers.models.auto.auto_factory"
_MIXIN, _MIXIN_USER = "GenerationMixin", "add_generation_mixin_to_remote_model"
# Module of the models' side → functions and classes of it that the importing modules only call.
_CALLED = {
    "transformers.generation.logits_process": ("WatermarkLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"),
    "transformers.modeling_gguf_pytorch_utils": ("load_gguf_checkpoint",),
}
_LEAVING_OUT = threading.RLock()


class TemplateError(ValueError):
    """A chat template refuses a conversation."""


@functools.cache
def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, once a process."""
    import_auto_tokenizer()
    from transformers import AutoTokenizer

    with torch_left_out():
        return AutoTokenizer.from_pretrained(folder)


def call_template(render: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Return the text that `render(*args, **kwargs)` makes by a chat template.

    Raises:
        TemplateError: with the template's own words.
    """
    try:
        return str(render(*args, **kwargs))
    except Exception as error:  # a template is code of the model's folder, and may raise anything
        raise TemplateError(f"{type(error).__name__}: {error}") from error


def import_auto_tokenizer() -> None:
    """Import `transformers.AutoTokenizer`. Idempotent, and models can be imported as usual before and after it."""
    with without_collections():
        with cached_scans():
            import transformers

        try:
            _import_rope()
            with _called_later(), _light_factory(transformers):
                assert transformers.AutoTokenizer is not None  # asked for, it is imported
        except ImportError:  # a version of transformers that takes other names: it imports all that it wants
            assert transformers.AutoTokenizer is not None


class _LazyTorch(types.ModuleType):
    """Stands in for torch in a module that uses it only inside functions; imports it at the first use."""

    def __getattr__(self, name: str) -> object:
        vars(sys.modules[_ROPE])["torch"] = torch = importlib.import_module("torch")
        return getattr(torch, name)


def _import_rope() -> None:
    """Import what every configuration is made with; it imports torch for the models' functions in it."""
    utils = importlib.import_module("transformers.utils")
    original = vars(utils).get("is_torch_available")
    if "torch" in sys.modules or _ROPE in sys.modules or original is None or not original():
        return
    vars(utils)["is_torch_available"] = lambda: False
    try:
        rope = importlib.import_module(_ROPE)
    finally:
        vars(utils)["is_torch_available"] = original
    vars(rope).update(is_torch_available=original, torch=_LazyTorch("torch"))


@contextmanager
def torch_left_out() -> Iterator[None]:
    """Read a tokenizer within it: the configuration of the model, which is read on the way, has its dtype as a text.

    transformers would import torch for torch's own name of it. Nothing is done where torch is there already. One
    thread at a time: a second one would take the first one's stand-in for the usual function, and leave it there.
    """
    with _LEAVING_OUT:
        configuration = vars(sys.modules[_CONFIG]) if _CONFIG in sys.modules else {}
        original = configuration.get("is_torch_available")
        if "torch" in sys.modules or original is None:
            yield
            return
        configuration["is_torch_available"] = lambda: False
        try:
            yield
        finally:
            configuration["is_torch_available"] = original


@contextmanager
def _called_later() -> Iterator[None]:
    """Replace the modules of `_CALLED` by stand-ins, which import the real ones when they are called."""
    absent = [module for module in _CALLED if module not in sys.modules]
    for module in absent:
        sys.modules[module] = types.ModuleType(module)
        for name in _CALLED[module]:
            setattr(sys.modules[module], name, functools.partial(_call, module, name))
    try:
        yield
    finally:
        for module in absent:
            del sys.modules[module]


def _call(module: str, name: str, *args: object, **kwargs: object) -> object:
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


@contextmanager
def _light_factory(transformers: types.ModuleType) -> Iterator[None]:
    """Import `auto_factory` with a stand-in for the mixin that it puts under model classes of remote code."""
    if _FACTORY in sys.modules:
        yield
        return
    generation = transformers.generation  # a lazy module: it imports a name's file at the first access
    vars(generation)[_MIXIN] = _MixinStandIn
    try:
        yield
    finally:
        del vars(generation)[_MIXIN]
    _complete_when_used(sys.modules[_FACTORY])


class _MixinStandIn:
    """A stand-in for `GenerationMixin` in `auto_factory`, until `_complete_when_used` replaces it."""


def _complete_when_used(factory: types.ModuleType) -> None:
    """Give `auto_factory` the real mixin in the one function that uses it."""
    original = getattr(factory, _MIXIN_USER)

    @functools.wraps(original)
    def completed(*args: object, **kwargs: object) -> object:
        from transformers.generation import GenerationMixin

        setattr(factory, _MIXIN, GenerationMixin)
        return original(*args, **kwargs)

    setattr(factory, _MIXIN_USER, completed)
