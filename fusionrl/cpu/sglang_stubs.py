"""Import stand-ins that let the unmodified SGLang wheel start on a CPU-only torch build.

SGLang imports a handful of GPU or multimedia packages at module level even where a CPU server never calls them.
`fusionrl.base.cpu_wing` decides who gets a stand-in for which package; this module makes them. Nothing is emulated:
calling a stand-in raises `NotImplementedError`. Triton's decorators are the one exception, as they are applied while a
module is imported: the kernel gets defined and cannot run.
"""

import types
from collections.abc import Callable, Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from typing import ClassVar


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
        return _identity  # a decorator with arguments: @triton.autotune(configs=...)

    def __bool__(self) -> bool:
        return False  # `if flag_of_the_package:` takes the path without the package

    def __iter__(self) -> Iterator[object]:
        return iter(())


def _is_triton(full_name: str) -> bool:
    return full_name.split(".")[0] == "triton"


def _identity(value: object) -> object:
    return value


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
