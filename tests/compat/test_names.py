"""The name `slime`: imports of a user's file resolve to fusionrl's, and what is missing says what to do."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusionrl.compat.slime.__main__ import main
from fusionrl.compat.slime.names import ABSENT_MODULES, MILES, MODULES, Absent, Here, resolve
from fusionrl.compat.slime.names import PAGE as SOURCE
from fusionrl.config.hooks import check_hook, load_function
from fusionrl.data.sample import Sample

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "from-slime-names.md"
INSTALL = "from fusionrl.config.hook_files import install_stand_ins; install_stand_ins()\n"
TABLE = MODULES | MILES
NAMES = [(module, name, entry) for module, names in TABLE.items() for name, entry in names.items()]


def python(code: str, cwd: Path) -> str:
    """What a fresh process prints; its errors are the test's."""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{code}"],
        capture_output=True,
        text=True,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_name_that_is_here_can_be_imported_by_its_own_path() -> None:
    for module, name, entry in NAMES:
        if isinstance(entry, Here):
            assert getattr(importlib.import_module(module), name) is resolve(entry), f"{module}.{name}"
    assert importlib.import_module("slime.utils.types").Sample is Sample


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n, entry in NAMES if isinstance(entry, Absent)])
def test_a_name_that_is_not_here_says_why_and_what_to_do(module: str, name: str) -> None:
    entry = TABLE[module][name]
    assert isinstance(entry, Absent)
    with pytest.raises(ImportError) as raised:
        exec(f"from {module} import {name}")
    assert entry.why in str(raised.value) and entry.instead in str(raised.value)


@pytest.mark.parametrize("module", ABSENT_MODULES)
def test_a_module_that_is_not_here_says_so_at_its_names(module: str) -> None:
    with pytest.raises(ImportError) as raised:
        exec(f"from {module}.something import anything")
    assert ABSENT_MODULES[module].instead in str(raised.value)


def test_ways_to_import() -> None:
    space: dict[str, Any] = {}
    code = """
import slime.utils.misc as U
import slime.rollout.sglang_rollout
from slime.utils import http_utils, types
from slime.rollout.sglang_rollout import *
from slime.agent.aiohttp_threaded import run_app_in_thread
"""
    exec(code, space)
    assert space["types"].Sample is Sample and space["U"].load_function and space["generate_and_rm_group"]
    assert space["slime"].rollout.sglang_rollout.generate is space["generate"]
    assert not hasattr(space["types"], "__wrapped__")
    with pytest.raises(ImportError, match="is not among the names of slime"):
        exec("from slime.utils.misc import something_new")


def test_a_path_of_slime_in_a_flag() -> None:
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    assert check_hook("dynamic_sampling_filter_path", path) is None
    assert load_function(path) is load_function("fusionrl.rollout.filters.check_reward_nonzero_std")
    assert check_hook("rollout_function_path", "slime.rollout.sglang_rollout.generate_rollout") is None
    message = str(check_hook("rollout_function_path", "slime.rollout.forge_load.generate_rollout"))
    assert "use tools/bench for timings" in message


def test_it_never_hides_an_installed_slime(tmp_path: Path) -> None:
    package = tmp_path / "slime" / "utils"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "types.py").write_text("class Sample: mine = 1\n")
    code = f"""
import fusionrl.config.hooks
sys.path.append({str(tmp_path)!r})
from slime.utils.types import Sample
print(Sample.mine)
try: import slime.utils.misc
except ModuleNotFoundError as error: print(error)
"""
    assert python(code, tmp_path.parent) == "1\nNo module named 'slime.utils.misc'"


def test_a_folder_of_the_name_is_no_installed_slime(tmp_path: Path) -> None:
    """A checkout lies in a folder `slime` beside the program, and its own code in one below."""
    inner = tmp_path / "slime" / "slime"
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text("raise RuntimeError('not installed')\n")
    (tmp_path / "slime" / "examples").mkdir()
    (tmp_path / "slime" / "examples" / "mine.py").write_text(
        "from slime.utils.types import Sample\ndef rm(args, sample): return isinstance(sample, Sample)\n"
    )
    code = (
        "sys.path.insert(0, '')\nfrom fusionrl.config.hooks import load_function\n"
        "from fusionrl.data.sample import Sample\n"
        "print(load_function('slime/examples/mine.py:rm')(None, Sample()))"
    )
    assert python(code, tmp_path) == "True"


def test_a_program_beside_a_run_gets_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that a user starts himself imports slime, and what stands beside it."""
    (tmp_path / "helper.py").write_text("NAME = 'beside'\n")
    (tmp_path / "server.py").write_text(
        "import sys\nfrom helper import NAME\n"
        "from slime.rollout.rm_hub import get_deepscaler_rule_based_reward as grade\n"
        "if __name__ == '__main__': print(NAME, sys.argv[1:], grade('</think>\\\\boxed{7}', '7'))\n"
    )
    command = [sys.executable, "-m", "fusionrl.compat.slime", str(tmp_path / "server.py"), "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "beside ['--port', '1'] 1.0", done.stderr
    monkeypatch.setattr(sys, "argv", ["slime", str(tmp_path / "none.py")])
    with pytest.raises(SystemExit, match="name a program that exists"):
        main()


def test_importing_names_loads_neither_torch_nor_megatron(tmp_path: Path) -> None:
    code = f"""{INSTALL}
import slime.utils.types, slime.rollout.rm_hub
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.observability.trace_utils import trace_span
from slime.rollout.filter_hub.base_types import MetricGatherer
from slime.utils.http_utils import get, post
from slime.utils.misc import load_function
"""
    assert python(code + "print([m for m in ('torch', 'megatron') if m in sys.modules])", tmp_path) == "[]"


def test_a_function_beside_a_hook_is_loaded_by_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "examples_of_s18" / "solve"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "agent.py").write_text("NAME = 'agent'\ndef act(): return NAME\n")
    (folder / "generate.py").write_text(
        "from slime.utils.misc import load_function\n"
        "def rm(args, sample): return load_function('examples_of_s18.solve.agent.act')()\n"
    )
    assert load_function(f"{folder}/generate.py:rm")(None, None) == "agent"


def test_the_page_is_that_of_the_table() -> None:
    said = "run: cp fusionrl/compat/slime/names.md docs/reference/from-slime-names.md"
    assert PAGE.read_text(encoding="utf-8") == SOURCE, said


@pytest.mark.parametrize("name", ["metric_utils", "logging_utils", "trace_utils", "tensorboard_utils", "timer"])
def test_a_module_is_found_where_it_was_before_it_moved(name: str) -> None:
    old, new = (importlib.import_module(f"slime.{folder}.{name}") for folder in ("utils", "observability"))
    assert dir(old) == dir(new)
    assert all(getattr(old, public) is getattr(new, public) for public in new.__all__)


def test_names_of_the_fork_alone() -> None:
    """They are not slime's, also where both have the module; messages say the name that was asked for."""
    space: dict[str, Any] = {}
    code = """
from miles.rollout.base_types import GenerateFnInput, RolloutFnTrainOutput
from miles.rollout.generate_hub import agentic_tool_call
import miles.rollout.inference_rollout.inference_rollout_common as common
from miles.utils.external_utils.exec_command import exec_command_cpu
from miles.utils.types import Sample
import miles.utils.timer
"""
    exec(code, space)
    assert space["Sample"] is Sample, "names of both are slime's"
    assert space["agentic_tool_call"].generate and space["common"].InferenceRolloutFn
    assert space["exec_command_cpu"]("echo 1", capture_output=True) == "1\n"
    for line, told in {
        "from slime.rollout.base_types import GenerateFnInput": "slime.rollout.base_types.GenerateFnInput is not among",
        "import slime.rollout.generate_hub as m; m.multi_turn": "slime.rollout.generate_hub.multi_turn does not exist",
        "from miles.rollout.checkpoint_eval import CheckpointEvalFn": "--eval-num-gpus",
        "from miles.utils.lora import lora_rollout_enabled": "lora_rollout_enabled is not among the names of miles",
        "from miles.utils.arguments import parse_args": "miles.utils.arguments.parse_args does not exist in fusionrl",
        "from miles.utils.types import no_such_name": "miles.utils.types.no_such_name is not among the names of miles",
        "from miles.ray.rollout import RolloutManager": "processes are started by fusionrl",
    }.items():
        with pytest.raises(ImportError) as raised:
            exec(line)
        assert told in str(raised.value), line
