"""A stand-in gives the names that are asked for, and everybody has the real module once somebody imports it."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fusionrl.base import imports
from fusionrl.base.imports import imported_later, when_imported

REAL = """
TEXT = "a text"
IMPORTED = True
class Refusal(RuntimeError): ...
class Made:
    def __init__(self, number): self.number = number
def refuse(): raise Refusal
def add(a, b=1): return a + b
"""
USER = """
from later_package.real import Made, Refusal, add
from later_package.real import TEXT
def caught(function):
    try:
        function()
    except Refusal:
        return True
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "later_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "real.py").write_text(REAL)
    (folder / "user.py").write_text(USER)
    (folder / "greedy.py").write_text("from later_package.real import TEXT, refuse\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(imports, "_stand_ins", {})
    finders = list(sys.meta_path)
    yield folder
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.split(".")[0] == "later_package"]:
        del sys.modules[name]


def _import(name: str) -> ModuleType:
    with imported_later("later_package.real", called=("add", "Made"), caught=("Refusal",), constants=("TEXT",)):
        return importlib.import_module(f"later_package.{name}")


def test_names_come_without_the_module_and_are_all_replaced(package: Path) -> None:
    (package / "second.py").write_text(USER)
    user, second = _import("user"), _import("second")
    assert "later_package.real" not in sys.modules
    assert user.add(2, b=3) == 5 and user.Made(4).number == 4
    real = sys.modules["later_package.real"]
    assert (user.add, user.Made, user.Refusal, user.TEXT) == (real.add, real.Made, real.Refusal, "a text")
    assert user.caught(real.refuse) and second.caught(real.refuse) and second.add is real.add and real.IMPORTED
    assert importlib.import_module("later_package.real") is real


def test_any_other_name_imports_the_module(package: Path) -> None:
    greedy = _import("greedy")
    real = sys.modules["later_package.real"]
    assert isinstance(real, ModuleType) and greedy.refuse is real.refuse and real.IMPORTED
    assert _import("user").add is real.add, "nothing is done where it is imported already"


def test_a_function_is_called_with_a_module_now_or_later(package: Path) -> None:
    seen: list[ModuleType] = []
    when_imported("later_package.real", seen.append)
    assert not seen
    real = importlib.import_module("later_package.real")
    when_imported("later_package.real", seen.append)
    assert seen == [real, real]


def test_a_module_that_is_gone_is_missing_as_usual(package: Path) -> None:
    """Another version of the package."""
    (package / "real.py").unlink()
    with pytest.raises(ImportError, match="real"):
        _import("greedy")
