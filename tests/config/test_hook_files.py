"""Hooks given as files: what they import beside them, in this process and in others."""

import asyncio
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.hooks import check_hook, load_function, register_hooks
from fusionrl.data.sample import Sample

Write = Callable[[dict[str, str]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write({"folder/file.py": text, …}) -> the folder around them."""

    def made(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return made


@pytest.mark.parametrize(
    "statement",
    [
        "from calc_tool import add",
        "import calc_tool; add = calc_tool.add",
        "from . import calc_tool; add = calc_tool.add",
        "import tools.calc as calc; add = calc.add",
        "import importlib.util; add = importlib.import_module('calc_tool').add",
        "from importlib import import_module; add = import_module('calc_tool').add",
        "from tools import *; add = calc.add",
        "def add(a, b):\n    from calc_tool import add\n    return add(a, b)",
    ],
)
def test_all_ways_to_import_a_neighbour(write: Write, statement: str) -> None:
    folder = write(
        {
            "calc_tool.py": "from deeper import one\ndef add(a, b): return a + b + one - 1\n",
            "deeper.py": "one = 1\n",
            "tools/calc.py": "from calc_tool import add\n",
            "tools/__init__.py": "from . import calc\n__all__ = ['calc']\n",
            "my-generate.v2.py": f"{statement}\nasync def f(args, sample, params): return add(2, 3)\n",
        }
    )
    path = f"{folder / 'my-generate.v2.py'}:f"
    assert check_hook("custom_generate_function_path", path) is None
    assert asyncio.run(load_function(path)(None, None, None)) == 5
    assert "calc_tool" not in sys.modules and str(folder) not in sys.path, "nobody else sees it"


def test_a_file_is_loaded_once(write: Write) -> None:
    hook = "import state\nfrom .state import SEEN\ndef f(x):\n    state.SEEN.append(x)\n    return SEEN\n"
    folder = write({"state.py": "SEEN = []\n", "one.py": hook, "two.py": hook})
    load_function(f"{folder / 'one.py'}:f")("a")
    assert load_function(f"{folder / 'two.py'}:f")("b") == ["a", "b"]
    assert load_function(f"{folder / 'one.py'}:f") is load_function(f"{folder / 'one.py'}:f"), "nor is the hook's file"


def test_two_folders_with_modules_of_one_name_do_not_mix(write: Write) -> None:
    hook = "from utils import NAME\ndef f():\n    import utils\n    return NAME, utils.NAME\n"
    utils = {f"{name}/utils.py": f"NAME='{name}'" for name in "ab"}
    folder = write(utils | {"a/h.py": hook, "b/h.py": hook})
    found = [load_function(f"{folder / name / 'h.py'}:f") for name in "ab"]
    assert [function() for function in found] == [("a", "a"), ("b", "b")]
    hook = "from importlib import import_module, simple\ndef f(): return import_module('utils').NAME, simple.__name__\n"
    write({"a/by_name.py": hook, "b/by_name.py": hook})
    found = [load_function(f"{folder / name / 'by_name.py'}:f") for name in "ab"]
    assert [function() for function in found] == [("a", "importlib.simple"), ("b", "importlib.simple")]


def test_a_neighbour_goes_before_a_module_of_python_and_hides_it_from_nobody(write: Write) -> None:
    """A folder `yaml` of files beside the hook is no module: the package of that name is."""
    code = "import random, json, yaml\ndef f(): return random.NUMBER, json.dumps([1]), yaml.safe_load('[1]')\n"
    folder = write({"h.py": code, "random.py": "NUMBER = 4\n", "yaml/x.yaml": ""})
    assert load_function(f"{folder / 'h.py'}:f")() == (4, "[1]", [1])
    assert random.randint(1, 1) == 1 and sys.modules["random"] is random


def test_files_of_a_package(write: Write) -> None:
    code = "from ..common import ONE\nfrom my_pkg.common import SEEN\nfrom . import other\n"
    code += "def f(args, sample): return ONE + other.TWO\nSEEN.append(1)\n"
    files = {"my_pkg/__init__.py": "", "my_pkg/common.py": "ONE, SEEN = 1, []\n", "my_pkg/rewards/score.py": code}
    files |= {"my_pkg/rewards/other.py": "from my_pkg.common import ONE\nTWO = 2 * ONE\n"}
    folder = write(files | {"my_pkg/rewards/__init__.py": "def g(args, sample): return 7\n"})
    assert load_function(f"{folder / 'my_pkg' / 'rewards' / 'score.py'}:f")(None, None) == 3
    assert load_function(f"{folder / 'my_pkg' / 'rewards' / '__init__.py'}:g")(None, None) == 7


def test_a_file_of_a_package_that_python_finds_keeps_its_name(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write({"findable/__init__.py": "", "findable/hook.py": "SEEN = []\ndef f(): return SEEN\n"})
    monkeypatch.syspath_prepend(str(folder))
    by_file = load_function(f"{folder / 'findable' / 'hook.py'}:f")
    by_file().append(1)
    assert load_function("findable.hook.f")() == [1]
    for name in ("findable", "findable.hook"):
        monkeypatch.delitem(sys.modules, name)


def test_the_framework_is_the_framework(write: Write) -> None:
    """A hook beside a checkout of fusionrl gets the one that runs."""
    root = Path(__file__).parents[2]
    link = write({"h.py": "from fusionrl.data.sample import Sample\ndef f(): return Sample\n"})
    (link / "fusionrl").symlink_to(root / "fusionrl")
    assert load_function(f"{link / 'h.py'}:f")() is Sample


def test_what_is_missing_is_said_with_the_line(write: Write) -> None:
    folder = write({"h.py": "\n\nimport calc_tol\n", "deep.py": "from broken import x\n", "broken.py": "1 / 0\n"})
    for name, said in (
        ("h.py", f"No module named 'calc_tol' at {folder / 'h.py'}:3: import calc_tol"),
        ("deep.py", f"division by zero at {folder / 'broken.py'}:1: 1 / 0"),
    ):
        assert said in str(check_hook("custom_rm_path", f"{folder / name}:f"))


PICKLED = """
import pickle, sys
from types import SimpleNamespace
from fusionrl.config.hooks import register_hooks
register_hooks({"custom_rm_path": sys.argv[1]})
found = pickle.load(sys.stdin.buffer)
print(type(found).__name__, found.value, found.double())
"""


def test_what_a_hook_makes_travels_to_other_processes(write: Write) -> None:
    """By the class's name, to a process that knows the folder and has not yet loaded the hook."""
    code = "class Note:\n    def __init__(self, value): self.value = value\n    def double(self): return 2 * self.value"
    folder = write({"notes.py": code, "h.py": "from notes import Note\ndef f(x): return Note(x)\n"})
    path = f"{folder / 'h.py'}:f"
    note: Any = load_function(path)(21)
    assert pickle.loads(pickle.dumps(note)).value == 21
    command = [sys.executable, "-c", PICKLED, path]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, input=pickle.dumps(note), capture_output=True, check=True, env=env, cwd="/")
    assert done.stdout.split() == [b"Note", b"21", b"42"]
    register_hooks({"rollout_sample_hook_path": [path], "custom_rm_path": None, "tools_path": "package.module.f"})


@pytest.mark.parametrize("name", ["colorsys", "yaml"])
def test_a_module_of_a_package_with_the_name_of_an_installed_one_imports_the_installed_one(
    write: Write, name: str
) -> None:
    folder = write(
        {
            "pkg/__init__.py": "",
            "pkg/llms/__init__.py": "",
            f"pkg/llms/{name}.py": f"from {name} import __name__ as theirs\nmine = 1\n",
            "pkg/llms/hook.py": f"import {name}\nfrom .{name} import mine, theirs\n"
            f"async def f(args, sample, params): return mine, theirs, hasattr({name}, 'mine')\n",
            f"script/{name}.py": f"from {name} import __name__ as theirs\nmine = 2\n",
            "script/hook.py": f"from {name} import mine, theirs\n"
            "async def f(args, sample, params): return mine, theirs, None\n",
        }
    )
    for path, expected in (("pkg/llms/hook.py", (1, name, False)), ("script/hook.py", (2, name, None))):
        hook = load_function(f"{folder / path}:f")
        assert asyncio.run(hook(None, None, {})) == expected
    assert not hasattr(sys.modules[name], "mine")


def test_a_hook_imports_by_the_path_that_leads_to_it(write: Write) -> None:
    """As a program that is started in the folder around `examples` does; folders without an __init__.py count, too."""
    folder = write(
        {
            "repo/examples_s35/__init__.py": "",
            "repo/examples_s35/more/plain/tool.py": "from examples_s35.more.pkg.common import ONE\nTWO = 2 * ONE\n",
            "repo/examples_s35/more/plain/hook.py": "from examples_s35.more.plain.tool import TWO\n"
            "from examples_s35.more.pkg import common\n"
            "async def f(args, sample, params): return TWO, common.ONE\n",
            "repo/examples_s35/more/pkg/__init__.py": "",
            "repo/examples_s35/more/pkg/common.py": "ONE = 1\n",
            "repo/examples_s35/more/pkg/hook.py": "import examples_s35.more.pkg.common\n"
            "from slime.utils.misc import load_function\n"
            "def two(): return 2\n"
            "async def f(args, sample, params):\n"
            "    return load_function('examples_s35.more.pkg.hook.two')(), examples_s35.more.pkg.common.ONE\n",
            "repo/examples_s35/more/pkg/lost.py": "import examples_s35.nothing\nasync def f(args, sample, p): ...\n",
            # A folder with hooks for a package, which is not installed.
            "repo/examples_s35/gym_s35/whole.py": "from gym_s35 import Env\nasync def f(args, sample, p): ...\n",
            "repo/examples_s35/gym_s35/part.py": "from gym_s35.types import Env\nasync def f(args, sample, p): ...\n",
        }
    )
    for name in ("plain/hook.py", "pkg/hook.py"):
        hook = load_function(f"{folder}/repo/examples_s35/more/{name}:f")
        assert asyncio.run(hook(None, None, {})) == (2, 1), name
    assert "examples_s35" not in sys.modules, "nobody else finds it"
    for name, missing in (("more/pkg/lost", "examples_s35"), ("gym_s35/whole", "gym_s35"), ("gym_s35/part", "gym_s35")):
        told = check_hook("custom_generate_function_path", f"{folder}/repo/examples_s35/{name}.py:f")
        assert f"ModuleNotFoundError: No module named '{missing}'" in str(told), name
