"""Import stand-ins that let the unmodified SGLang wheel start on a CPU-only torch build.

SGLang imports a handful of GPU or multimedia packages at module level even where a CPU server never
calls them. `install` appends one finder to the end of `sys.meta_path` that answers for those packages:

* it comes last, so an installed package always wins, but for SGLang's CUDA kernels where CUDA's driver is missing: the
  installed package cannot be loaded there (the GPU requirement set on a machine without a GPU);
* it answers only when a module of `sglang` (or of Megatron-core, which imports triton since 0.19) is the importer, so
  torch and transformers go on seeing "not installed" and choose their own CPU paths;
* nothing is emulated: calling a stand-in raises `NotImplementedError`. Triton's decorators are the one
  exception, as they are applied while a module is imported: the kernel gets defined and cannot run.

It must be active in every process that imports sglang; `fusionrl.engines.launch_server` sees to that.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import ClassVar

STAND_INS = ("triton", "torchvision", "gguf", "sgl_kernel", "soundfile")
"""Top-level packages that SGLang imports unconditionally and a CPU server never calls."""


KERNELS = "sgl_kernel"


def install() -> None:
    """Append the finder to `sys.meta_path`, once per process."""
    if any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        return
    sys.meta_path.append(_StandInFinder())
    if _has_kernels_of_cuda() and not _has_driver():
        sys.meta_path.insert(0, _KernelsFinder())


def _has_kernels_of_cuda() -> bool:
    """Return whether SGLang's kernels are installed as built for CUDA: with a folder for each kind of GPU."""
    spec = importlib.util.find_spec(KERNELS) if KERNELS not in sys.modules else None
    folders = spec.submodule_search_locations or [] if spec is not None else []
    return any((Path(folder) / "sm100").is_dir() for folder in folders)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


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


class _StandInLoader(Loader):
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
        """Nothing to run: attributes appear when they are asked for."""


class _StandInFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        root = fullname.split(".")[0]
        if root not in STAND_INS:
            return None
        # A sub-module of a stand-in already imported follows it; the first import has to be SGLang's.
        if not isinstance(sys.modules.get(root), _StandInModule) and not _importer_is_sglang():
            return None
        return ModuleSpec(fullname, _StandInLoader(), is_package=True)


class _KernelsFinder(_StandInFinder):
    """Comes first, and answers for SGLang's kernels alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        return super().find_spec(fullname, path, target) if fullname.split(".")[0] == KERNELS else None


def _importer_is_sglang() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    while frame is not None and "importlib" in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("sglang", "megatron")
