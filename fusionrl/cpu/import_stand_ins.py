"""Import stand-ins that let the unmodified SGLang wheel start on a CPU-only torch build.

SGLang imports a handful of GPU or multimedia packages at module level even where a CPU server never calls them.
`fusionrl.base.cpu_wing` decides who gets a stand-in for which package; this module makes them. Nothing is emulated:
calling a stand-in raises `NotImplementedError`. Triton's decorators are the one exception, as they are applied while a
module is imported: the kernel gets defined and cannot run.

Parts of torch that large libraries import, and a process on a CPU never uses, are imported when they are used.
"""

import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from typing import ClassVar, TypeVar

from fusionrl.base.imports import imported_later

T = TypeVar("T")

_COMPILER, _DECORATORS = "torch._dynamo", ("allow_in_graph", "assume_constant_result", "disable")


def _refuse(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} was called, but {name.split('.')[0]} is not installed: on a CPU the engine runs on a "
        f"stand-in that can be imported, not used. Install the package or choose an SGLang option that does "
        f"not need it."
    )


class _StandInType(type):
    """Metaclass of stand-in classes: any class attribute (an enum's member, say) is just its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandInModule(types.ModuleType):
    """A module whose attributes are made when asked for: classes for `CapWords`, else sub-modules."""

    __path__: list[str] = []  # noqa: RUF012  # an instance has it in its base class
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        is_class = name[:1].isupper() and not name.isupper()
        value = _make_class(full_name) if is_class else _StandInModule(full_name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not _is_triton(self.__name__):
            raise _refuse(self.__name__)
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # a bare decorator: @triton.jit
        return lambda value: value  # a decorator with arguments: @triton.autotune(configs=...)

    def __bool__(self) -> bool:
        return False  # `if flag_of_the_package:` takes the path without the package

    def __iter__(self) -> Iterator[object]:
        return iter(())


def _is_triton(full_name: str) -> bool:
    return full_name.split(".")[0] == "triton"


def _make_class(full_name: str) -> type:
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        # triton.Config(...) is built in decorator arguments at import time.
        if not _is_triton(full_name):
            raise _refuse(full_name)

    module, _, name = full_name.rpartition(".")
    return _StandInType(name, (), {"__module__": module, "__init__": __init__})


class StandInLoader(Loader):
    """Makes the stand-in of a module."""

    # Integer helpers used in module-level constants; plain arithmetic, not kernels.
    _TRITON_HELPERS: ClassVar[dict[str, Callable[..., int]]] = {
        "cdiv": lambda a, b: -(a // -b),
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
    }

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _StandInModule(spec.name)
        if spec.name == "triton":
            for name, helper in self._TRITON_HELPERS.items():
                setattr(module, name, helper)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: attributes appear at first use."""


def symbols_later() -> AbstractContextManager[None]:
    """Import libraries within it without torch's symbolic shapes, and with them SymPy: 0.4 s of a core.

    transformers and Megatron-core import torch's distributed tensors, to know their class; these take three names.
    """
    return imported_later(
        "torch.fx.experimental.symbolic_shapes",
        called=("guard_or_false", "guard_or_true", "statically_known_true"),
        caught=("GuardOnDataDependentSymNode",),
    )


@contextmanager
def uncompiled() -> Iterator[None]:
    """Import libraries within it without torch's compiler. With TORCHDYNAMO_DISABLE=1, as in engines on a CPU, its
    decorators leave a function as it is. Nothing is done where torch may compile, or has imported its compiler."""
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
    return (lambda given: given) if function is None else function
