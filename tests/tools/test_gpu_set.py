"""What runs on the GPU requirement set without a GPU: the command, its steps, and pins that agree."""

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from fusionrl.base import cpu_wing
from tools import gpu_set
from tools import gpu_set_imports as imports
from tools.gpu_set_imports import ALONE, LAST_LINE, PIECES, failed_in
from tools.proof.machine import ROOT
from tools.proof.stage import Setting

Capsys, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
SETTING = Setting(Path("/nowhere"), Path("/nowhere"), rehearses=True)


def test_the_command_is_refused_for_another_set() -> None:
    command = ["bash", str(ROOT / "scripts/test.sh"), "--set", "tpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--set tpu: the only other set is gpu" in done.stderr


def test_steps_run_programs_that_exist(capsys: Capsys) -> None:
    assert gpu_set.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == [step.name for step in gpu_set.STEPS]
    for step in gpu_set.STEPS:
        paths = [part for part in step.command(SETTING) if part.startswith(("tests/", "tools/", "scripts/"))]
        assert paths and all((ROOT / path).exists() for path in paths), (step.name, paths)


def test_imports_that_end_in_a_crash_are_failures(capsys: Capsys) -> None:
    assert failed_in([sys.executable, "-c", "import os; os.abort()"]) == 1
    assert "ended by SIGABRT" in capsys.readouterr().out
    assert failed_in([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert failed_in([sys.executable, "-c", ""]) == 0


def test_what_changes_its_process_gets_one_of_its_own(monkeypatch: Patch, capsys: Capsys) -> None:
    """Before, a server's imports hid Megatron-core from all that came after them, and half programs were run."""
    names = set(imports.modules())
    files = [path for path in (ROOT / "fusionrl").rglob("*.py") if path.name != "__main__.py"]
    assert set(ALONE) <= names and not set(PIECES) & names and len(names) + len(PIECES) == len(files)
    assert all((ROOT / (name.replace(".", "/") + ".py")).is_file() for name in PIECES)
    assert str(imports.error_of("fusionrl.no_such")).startswith("ModuleNotFoundError: ")
    assert imports.error_of("json") is None
    alone, here = Mock(return_value=0), Mock(return_value=None)
    monkeypatch.setattr(imports, "failed_in", alone)
    monkeypatch.setattr(imports, "error_of", here)
    for name in ("install_stand_ins", "prepare_megatron"):
        monkeypatch.setattr(cpu_wing, name, Mock())
    assert imports.main([]) == 0
    assert [call.args[0][-1] for call in alone.call_args_list] == ["packages", *ALONE]
    assert {call.args[0] for call in here.call_args_list} == names - set(ALONE)
    last = f"{len(names)} modules of fusionrl, 0 imports failed"
    assert capsys.readouterr().out.splitlines()[-1] == last and re.match(LAST_LINE, last)
