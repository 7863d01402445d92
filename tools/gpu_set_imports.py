"""Import, without a GPU, the packages that only the GPU requirement set has, and every module of fusionrl.

The packages of OURS must import: trainers and engines on a CPU need them, or have no other way to be compiled wrongly
and found out here. The others are SGLang's; their messages without CUDA's driver are printed, and are not failures.
"""

import importlib
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

OURS = ("torch", "transformer_engine.pytorch", "megatron.core", "sglang", "sglang_router", "triton", "torchvision")
SGLANGS = (
    *("sgl_kernel", "flashinfer", "deep_gemm", "deep_ep", "flash_mla", "tilelang", "quack", "cutlass", "torchcodec"),
    *("torchaudio", "torch_memory_saver", "nccl", "humming"),
)
# Pieces of a program that a sandbox runs behind another piece; nothing imports them.
PIECES = ("fusionrl.rewards.harness.judge", "fusionrl.rewards.harness.program")
# Makes its process a server's, in which SGLang finds no Megatron-core.
ALONE = ("fusionrl.engines.server_imports",)
LAST_LINE = r"^\d+ modules of fusionrl"


def modules() -> Iterator[str]:
    """Names of all modules below fusionrl/."""
    import fusionrl

    yield "fusionrl"
    for module in pkgutil.walk_packages(fusionrl.__path__, "fusionrl."):
        if not module.name.endswith("__main__") and module.name not in PIECES:
            yield module.name


def error_of(name: str) -> str | None:
    """Import a module; return the kind of its error and the first line that says something."""
    try:
        importlib.import_module(name)
    except Exception as error:  # any exception of the package is the answer
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return None


def packages() -> int:
    """Import the packages as a machine with a GPU would, without the layers that a CPU needs."""
    # torch comes first, as everywhere here: it loads libraries that Transformer Engine finds by their names alone.
    num_failed = 0
    for name in (*OURS, *SGLANGS):
        error = error_of(name)
        print(f"{name:<28}{'imports' if error is None else error}", flush=True)
        num_failed += error is not None and name in OURS
    return num_failed


def failed_in(command: Sequence[str]) -> int:
    """Run this program in a process of its own, for packages or a module.

    Returns its number of failures, one for a process that dies.
    """
    code = subprocess.run(command, check=False).returncode
    if code < 0:
        place = "in the import of the one after the last line" if command[-1] == "packages" else "in its import"
        print(f"{command[-1]}: ended by {signal.Signals(-code).name} {place}", flush=True)
    return max(code, int(code != 0))


def main(argv: list[str]) -> int:
    """Print a line a package, and a line for each module that does not import. `argv`: "packages", or modules alone."""
    if argv == ["packages"]:
        return packages()
    num_failed = 0 if argv else failed_in([sys.executable, __file__, "packages"])
    from fusionrl.base import cpu_wing

    cpu_wing.install_stand_ins()
    cpu_wing.prepare_megatron()
    names = argv or list(modules())
    for name in names:
        if name in ALONE and not argv:
            num_failed += failed_in([sys.executable, __file__, name])
        elif (error := error_of(name)) is not None:
            print(f"{name}: {error}", flush=True)
            num_failed += 1
    print(f"{len(names)} modules of fusionrl, {num_failed} imports failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
