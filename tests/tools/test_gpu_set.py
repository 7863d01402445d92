"""What runs on the GPU requirement set without a GPU: the command, its steps, and pins that agree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import gpu_set
from tools.gpu_set_imports import ALONE, LAST_LINE, PIECES, failed_in, modules
from tools.proof.machine import ROOT
from tools.proof.stage import Failed, Setting, Stage


def test_the_command_is_refused_for_another_set() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/test.sh"), "--set", "tpu"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--set tpu: the only other set is gpu" in done.stderr


def test_steps_run_programs_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_set.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == [step.name for step in gpu_set.STEPS]
    for step in gpu_set.STEPS:
        command = step.command(Setting(Path("/nowhere"), Path("/nowhere"), rehearses=True))
        paths = [part for part in command if part.startswith(("tests/", "tools/", "scripts/"))]
        assert paths, step.name
        assert all((ROOT / path).exists() for path in paths), paths


def test_a_step_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(code: str) -> Stage:
        return Stage(code[:4], (), lambda setting: [sys.executable, "-c", code], gpu_set._read_line("seen"))

    good = "import os; print('seen', repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    monkeypatch.setattr(gpu_set, "STEPS", (program("bad = 1 / 0"), program(good)))
    assert gpu_set.main(["--out", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "1 of 2 steps passed" in output
    assert "ZeroDivisionError" in output
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["status"], line["figures"]) for line in lines] == [("failed", {}), ("passed", {"it says": "seen ''"})]


@pytest.mark.parametrize(
    ("output", "figure"),
    [
        ("....\n12 passed, 3 skipped in 4.20s\n", "12 passed, 3 skipped in 4.20s"),
        ("=== 2 failed, 10 passed in 61.00s (0:01:01) ===\n", None),
        ("no tests ran in 0.01s\n", None),
    ],
)
def test_the_end_of_pytest(output: str, figure: str | None) -> None:
    setting = Setting(Path("/nowhere"), Path("/nowhere"), rehearses=True)
    if figure is None:
        with pytest.raises(Failed):
            gpu_set._read_pytest(setting, int("failed" in output), output)
    else:
        assert gpu_set._read_pytest(setting, 0, output) == {"pytest": figure}


def test_all_modules_are_named() -> None:
    files = [path.relative_to(ROOT) for path in (ROOT / "fusionrl").rglob("*.py") if path.name != "__main__.py"]
    assert len(set(modules())) + len(PIECES) == len(files)
    assert re.match(LAST_LINE, "700 modules of fusionrl, 0 imports failed")


def test_imports_that_end_in_a_crash_are_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert failed_in([sys.executable, "-c", "import os; os.abort()"]) == 1
    assert "ended by SIGABRT" in capsys.readouterr().out
    assert failed_in([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert failed_in([sys.executable, "-c", ""]) == 0


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {package.strip().lower().replace("_", "-"): version.strip() for package, version in pins}


@pytest.mark.parametrize("base", ["cpu.txt", "gpu.txt"])
@pytest.mark.parametrize("beside", ["dev.txt", "examples.txt"])
def test_what_goes_in_beside_a_set_moves_none_of_its_pins(base: str, beside: str) -> None:
    fixed, more = _pins(base), _pins(beside)
    assert {name: version for name, version in more.items() if fixed.get(name, version) != version} == {}


def test_what_changes_its_process_is_imported_in_one_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """Before, a server's imports hid Megatron-core from all that came after them, and half programs were run."""
    names = list(modules())
    assert set(ALONE) <= set(names) and not set(PIECES) & set(names)
    for name in PIECES:
        assert (Path(__file__).parents[2] / (name.replace(".", "/") + ".py")).is_file()
    done = subprocess.run([sys.executable, "tools/gpu_set_imports.py", ALONE[0]], cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and "1 modules of fusionrl, 0 imports failed" in capfd.readouterr().out
