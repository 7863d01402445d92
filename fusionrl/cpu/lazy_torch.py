"""Parts of torch that large libraries import and a process on a CPU never uses: imported when they are used.

* `symbols_later`: transformers and Megatron-core import torch's distributed tensors, to know their class; these take
  three names of its symbolic shapes, and with these SymPy: 0.4 s of a core.
* `uncompiled`: SGLang and transformers import torch's compiler for decorators, and for a class that transformers' own
  models use. With TORCHDYNAMO_DISABLE=1, as in engines on a CPU, the decorators leave a function as it is.
"""

import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from fusionrl.base.imports import imported_later

T = TypeVar("T")

_COMPILER, _DECORATORS = "torch._dynamo", ("allow_in_graph", "assume_constant_result", "disable")


def symbols_later() -> AbstractContextManager[None]:
    """Import libraries within it. Nothing is done where torch's symbolic shapes are imported already."""
    return imported_later(
        "torch.fx.experimental.symbolic_shapes",
        called=("guard_or_false", "guard_or_true", "statically_known_true"),
        caught=("GuardOnDataDependentSymNode",),
    )


@contextmanager
def uncompiled() -> Iterator[None]:
    """Import libraries within it. Nothing is done where torch may compile, or its compiler is imported already."""
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1" or _COMPILER in sys.modules:
        yield
        return
    import torch

    places = [(torch, "compile"), *((torch.compiler, name) for name in _DECORATORS)]
    originals = [(module, name, getattr(module, name)) for module, name in places if hasattr(module, name)]
    for module, name, _ in originals:
        setattr(module, name, _as_it_is)
    vars(torch)["_dynamo"] = stand_in = _Compiler(_COMPILER)  # torch imports it at first use
    try:
        with imported_later(f"{_COMPILER}._trace_wrapped_higher_order_op", called=("TransformGetItemToIndex",)):
            yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)
        if vars(torch).get("_dynamo") is stand_in:
            del vars(torch)["_dynamo"]


class _Compiler(types.ModuleType):
    """Replaces the attribute for torch's compiler: its decorators concern functions that it never compiles."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _as_it_is if name in _DECORATORS else getattr(importlib.import_module(_COMPILER), name)


def _as_it_is(function: T | None = None, *args: object, **options: object) -> T | Callable[[T], T]:
    """Decorate nothing: `@compile`, `@compile(dynamic=True)`, `compile(function)`."""
    return _same if function is None else function


def _same(function: T) -> T:
    return function
