"""Large libraries are imported without collections, later, or with kept scans, and are the real ones afterwards."""

import gc
import importlib
import importlib.metadata
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fusionrl.base import imports
from fusionrl.base.imports import _cache_scan, _distributions, imported_later, when_imported, without_collections
from tests.own_process import run_code


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_rests_and_goes_on_as_before(was_enabled: bool) -> None:
    before, num_frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with without_collections():
            assert not gc.isenabled()
        assert gc.isenabled() is was_enabled
        assert gc.get_freeze_count() == num_frozen, "nothing was imported: else it would never be collected"
    finally:
        (gc.enable if before else gc.disable)()


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


# How many files of models an import opens; the structures of both kinds of answer are the same.
_COUNT = """
import json, os, sys
opened = set()
parts = os.sep + os.path.join("transformers", "models") + os.sep
sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" and parts in str(args[0]) else None)
from fusionrl.data.tokenizer import import_auto_tokenizer
import_auto_tokenizer()
print(len([path for path in opened if path.endswith(".py")]))
"""
_COMPARE = """
import importlib.metadata
from pathlib import Path
import transformers
from transformers.utils import import_utils
models = Path(transformers.__file__).parent / "models"
kept = import_utils.define_import_structure
for path, prefix in ((models, "models"), (str(models / "__init__.py"), None), (models / "qwen3", "models.qwen3")):
    assert kept(path, prefix=prefix) == kept.__wrapped__(path, prefix), path
kept(models)[frozenset()].clear()
assert kept(models)[frozenset()], "each caller has its own"
assert import_utils.PACKAGE_DISTRIBUTION_MAPPING == importlib.metadata.packages_distributions()
assert type(importlib.metadata.packages_distributions).__name__ == "function", "the usual one is back"
from transformers import AutoConfig, Qwen3Config
"""


def test_the_second_process_opens_no_models_and_knows_the_same(tmp_path: Path) -> None:
    assert int(run_code(_COUNT, XDG_CACHE_HOME=str(tmp_path))) > 1000
    assert len(list((tmp_path / "fusionrl").iterdir())) == 2
    assert int(run_code(_COUNT + _COMPARE, XDG_CACHE_HOME=str(tmp_path))) < 100


def _models(tmp_path: Path) -> tuple[Path, Path]:
    """The file of transformers' function, and that of a model."""
    source = tmp_path / "package" / "utils" / "import_utils.py"
    model = tmp_path / "package" / "models" / "one" / "modeling_one.py"
    for path in (source, model):
        path.parent.mkdir(parents=True)
        path.write_text("1")
    return source, model


@pytest.fixture
def found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was found out, in a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return []


STRUCTURE: Any = {
    frozenset({"torch"}): {"one": {"One", "OneConfig"}},
    frozenset(): {},
}


def _scanner(source: Path, usual: Callable[..., Any]) -> Callable[..., Any]:
    module: Any = ModuleType("transformers.utils.import_utils")
    module.__file__, module.define_import_structure = str(source), usual
    _cache_scan(module)
    scan: Callable[..., Any] = module.define_import_structure
    return scan


def _scan(source: Path, found_out: list[str]) -> Any:
    def usual(path: str | Path, prefix: str | None = None) -> Any:
        found_out.append(str(path))
        return STRUCTURE

    return _scanner(source, usual)(source.parents[1] / "models", prefix="models")


CHANGES: list[Any] = [
    lambda source, model: source.write_text("another"),
    lambda source, model: model.write_text("another"),
    lambda source, model: model.with_name("configuration_one.py").touch(),
    lambda source, model: model.unlink(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_is_read_again(tmp_path: Path, found_out: list[str], change: Any) -> None:
    source, model = _models(tmp_path)
    expected = {frozenset({"torch"}): {"models.one": {"One", "OneConfig"}}, frozenset(): {}}
    assert [_scan(source, found_out) for _ in range(2)] == [expected, expected] and len(found_out) == 1
    change(source, model)
    assert _scan(source, found_out) == expected and len(found_out) == 2


@pytest.mark.parametrize("text", ["{", "{}", "[]", '[["torch"]]', '[["torch", {"one": 3}]]'])
def test_a_file_of_another_form_is_written_anew(tmp_path: Path, found_out: list[str], text: str) -> None:
    source, _ = _models(tmp_path)
    _scan(source, found_out)
    (file,) = (tmp_path / "cache" / "fusionrl").iterdir()
    kept = file.read_text()
    file.write_text(text)
    assert _scan(source, found_out) == _scan(source, found_out) and len(found_out) == 2
    assert file.read_text() == kept
    file.chmod(0o666)
    _scan(source, found_out)
    assert len(found_out) == 3, "another process may have written it"


def _install(folder: Path, name: str, module: str | None = None) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "top_level.txt").write_text(module or name)


def test_the_packages_of_a_folder(tmp_path: Path, found_out: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    _install(folder, "one")
    monkeypatch.setattr(sys, "path", [str(folder), str(tmp_path / "none")])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if finder is PathFinder])

    def usual() -> dict[str, list[str]]:
        found_out.append("usual")
        return dict(importlib.metadata.packages_distributions())  # type: ignore[arg-type]

    assert [_distributions(usual) for _ in range(2)] == [{"one": ["one"]}] * 2 and len(found_out) == 1
    (file,) = (tmp_path / "cache" / "fusionrl").iterdir()
    for damaged in ("[]", "{}", '[["one", "two"]]'):
        file.write_text(damaged)
        found_out.clear()
        assert [_distributions(usual) for _ in range(2)] == [{"one": ["one"]}] * 2 and len(found_out) == 1
    shutil.rmtree(folder)
    _install(folder, "one", "another_module")
    importlib.invalidate_caches()
    assert _distributions(usual) == {"another_module": ["one"]} and len(found_out) == 2
    (folder / "a_lost_link.egg-info").symlink_to(tmp_path / "none")
    _install(folder, "two")
    importlib.invalidate_caches()
    assert set(_distributions(usual)) == {"another_module", "two"} and len(found_out) == 3
    archive = tmp_path / "packages.zip"
    archive.touch()
    monkeypatch.setattr(sys, "path", [str(folder), str(archive)])
    importlib.invalidate_caches()
    assert _distributions(usual) == _distributions(usual) and len(found_out) == 5, "no answer of an archive is kept"


def test_without_a_home_it_is_found_out(tmp_path: Path, found_out: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    source, _ = _models(tmp_path)
    assert _scan(source, found_out) == _scan(source, found_out) and len(found_out) == 2
    monkeypatch.undo()  # nor is an answer kept that JSON changes, of another transformers
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scan = _scanner(source, lambda path, prefix=None: {frozenset(): {"one": {("a", "pair")}}})
    assert scan(source.parents[1] / "models") == {frozenset(): {"one": {("a", "pair")}}}
    assert not (tmp_path / "cache").exists()
