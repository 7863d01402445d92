"""The import stand-ins: who gets them, and that they cannot be used."""

from pathlib import Path

import pytest

from tests.own_process import run_code

PROGRAM = """
import sys
from fusionrl.base import cpu_wing
cpu_wing.STAND_INS = ("absent_kernels", "json", "triton_absent")
cpu_wing.install_stand_ins(); cpu_wing.install_stand_ins()
assert sum(type(f).__name__ == "_StandInFinder" for f in sys.meta_path) == 1

try:
    import absent_kernels
    raise SystemExit("a package other than sglang got a stand-in")
except ModuleNotFoundError:
    pass

import sglang.user as user
assert user.absent.kernels.is_there is not None and not user.absent.AVAILABLE
import json
assert json.loads("1") == 1 and user.json is json          # a real package wins
try:
    import json.another_absent_part
    raise SystemExit("a real package counts as replaced, since sglang imported an absent part of it")
except ModuleNotFoundError:
    pass
for use in (user.absent.kernel, user.absent.sub.kernel, user.absent.Module, user.Imported):
    try:
        use(1)
        raise SystemExit(f"{use} could be called")
    except NotImplementedError as error:
        assert "absent_kernels" in str(error), error
"""


def _run(folder: Path, code: str, *arguments: str) -> str:
    """What a program prints that finds packages in `folder`."""
    return run_code(code, *arguments, PYTHONPATH=f"{folder}:{Path(__file__).parents[2]}")


def test_stand_ins(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "user.py").write_text(
        "import absent_kernels as absent, json\nfrom absent_kernels.deep.er import Imported\n"
        "class Derived(Imported): pass\n"
        "try: import json.absent_part\n"
        "except ImportError: pass\n"
    )
    _run(tmp_path, PROGRAM)


OF_CUDA = """
import sys
from fusionrl.base import cpu_wing
cpu_wing._has_driver = lambda: sys.argv[1] == "driver"
cpu_wing.install_stand_ins(); cpu_wing.install_stand_ins()
import sglang.user as user
print("real" if hasattr(user.sgl_kernel, "__file__") else "stand-in", user.scalar_type.__name__)
"""


@pytest.mark.parametrize(
    ("driver", "built_for", "wanted"),
    [("none", "sm100", "stand-in"), ("driver", "sm100", "real"), ("none", "cpu", "real")],
)
def test_kernels_of_cuda_stand_aside_without_its_driver(
    tmp_path: Path, driver: str, built_for: str, wanted: str
) -> None:
    for package in ("sglang", "sgl_kernel"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "sgl_kernel" / "scalar_type.py").write_text("")
    (tmp_path / "sgl_kernel" / built_for).mkdir()
    (tmp_path / "sglang" / "user.py").write_text("import sgl_kernel\nfrom sgl_kernel import scalar_type\n")
    assert _run(tmp_path, OF_CUDA, driver).split() == [wanted, "sgl_kernel.scalar_type"]


def test_triton_decorators_define_and_do_not_run() -> None:
    from fusionrl.cpu import import_stand_ins

    triton = import_stand_ins.StandInLoader().create_module(import_stand_ins.ModuleSpec("triton", None))

    def kernel() -> str:
        return "ran"

    assert triton.jit(kernel) is kernel
    assert triton.autotune(configs=[triton.Config({})], key=[])(kernel) is kernel
    assert triton.cdiv(7, 4) == 2
    assert triton.next_power_of_2(5) == 8
