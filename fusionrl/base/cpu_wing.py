"""The door to the wing `cpu`: whether this process needs it, and import stand-ins that load it when they are used.

A process that has a CUDA device and the packages for it imports nothing of `fusionrl.cpu`.
"""

import ctypes
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

ATTENTION_BACKEND = "torch_batched"
"""The wing's attention for SGLang's engines, as a value of --sglang-attention-backend."""
DEPENDS_ON_BATCH = "a row's last bits depend on the batch"
"""In the log of an engine whose products do so: its run is not repeatable (`cpu/row_products.py`)."""
PROCESSOR_VARIABLE = "FUSIONRL_IMAGE_PROCESSOR"
"""Environment variable of an engine on a CPU: SGLang's module of image processors that its model needs."""
STAND_INS = ("triton", "torchvision", "gguf", "sgl_kernel", "soundfile")
"""Packages that SGLang imports unconditionally and a CPU server never calls."""
_KERNELS = "sgl_kernel"
_IMPORTERS = ("sglang", "megatron")


def lacks_cuda() -> bool:
    """Return whether this process has no CUDA device, so that Megatron-core and SGLang need the wing. Imports torch."""
    import torch

    return not torch.cuda.is_available()


def prepare_megatron() -> None:
    """Let megatron.core, imported next, run on torch's CPU build. Does nothing where there is a CUDA device."""
    if lacks_cuda():
        from fusionrl.cpu import megatron_patches

        megatron_patches.install()


def install_stand_ins() -> None:
    """Let SGLang and Megatron-core import the packages of `STAND_INS` where they are missing. Once per process.

    One finder comes last in `sys.meta_path`, so an installed package wins. SGLang's CUDA kernels are the exception:
    without CUDA's driver they cannot be loaded, so a second finder precedes the installed package.
    """
    if any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        return
    sys.meta_path.append(_StandInFinder(STAND_INS))
    if _has_cuda_kernels() and not _has_driver():
        sys.meta_path.insert(0, _StandInFinder((_KERNELS,)))


def _has_cuda_kernels() -> bool:
    """Return whether SGLang's kernels are installed as built for CUDA: with a folder for each kind of GPU."""
    spec = importlib.util.find_spec(_KERNELS) if _KERNELS not in sys.modules else None
    folders = spec.submodule_search_locations or [] if spec is not None else []
    return any((Path(folder) / "sm100").is_dir() for folder in folders)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _StandInFinder(MetaPathFinder):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages
        self._replaced: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for a missing package only if SGLang or Megatron-core imports it: others choose their CPU paths."""
        root = fullname.split(".")[0]
        if root not in self._packages:
            return None
        # A sub-module of a stand-in already imported follows it; the first import has to be SGLang's.
        if not (root in self._replaced and root in sys.modules) and _importer() not in _IMPORTERS:
            return None
        from fusionrl.cpu.import_stand_ins import StandInLoader

        if fullname == root:  # else an installed package lacks one sub-module
            self._replaced.add(root)
        return ModuleSpec(fullname, StandInLoader(), is_package=True)


def _importer() -> str | None:
    """Return the top-level package whose code runs the current import."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return None if frame is None else frame.f_globals.get("__name__", "").split(".")[0]
