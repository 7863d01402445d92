"""Hooks: how they are found, and what is said of one that cannot be loaded or called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fusionrl.checks.validate import validate
from fusionrl.config.hooks import SIGNATURES, check_hook, load_function
from fusionrl.config.parser import read_args

GOOD = """
CALLS = []
NOT_A_FUNCTION = 3
async def rm(args, sample, **kwargs): return 1.0
async def too_few(args): return 1.0
def rollout(args, rollout_id, data_source): return []
class Source:
    def __init__(self, args): pass
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "user_hooks.py"
    path.write_text(GOOD)
    return str(path)


def test_a_file_is_loaded_once(module: str) -> None:
    """A hook that keeps state in its module finds it again, by whichever flag it is called."""
    load_function(f"{module}:rm").__globals__["CALLS"].append(1)
    assert load_function(f"{module}:rollout").__globals__["CALLS"] == [1]


def test_the_defaults_fit_their_own_signatures() -> None:
    assert check_hook("rollout_function_path", "fusionrl.rollout.sglang_rollout.generate_rollout") is None
    assert check_hook("rollout_function_path", "fusionrl.rollout.sft_rollout.generate_rollout") is None
    assert check_hook("custom_generate_function_path", "fusionrl.rollout.sglang_rollout.generate") is None
    assert check_hook("dynamic_sampling_filter_path", "fusionrl.rollout.filters.check_reward_nonzero_std") is None
    assert check_hook("data_source_path", "fusionrl.buffer.data_source.RolloutDataSource") is None


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("nothing_of_that_name.rm", "No module named 'nothing_of_that_name'"),
        ("json.no_such_function", "has no 'no_such_function'"),
        ("justaname", "neither package.module.function nor path/to/file.py:function"),
        ("/nowhere/hooks.py:rm", "'/nowhere/hooks.py'"),
        ("{module}:missing", "has no 'missing'"),
        ("{module}:NOT_A_FUNCTION", "is not callable"),
        ("{module}:too_few", "does not fit (too many positional arguments)"),
    ],
)
def test_what_is_wrong_is_said_with_flag_path_and_signature(module: str, path: str, part: str) -> None:
    path = path.format(module=module)
    message = check_hook("custom_rm_path", path)
    assert "--custom-rm-path" in message
    assert path in message
    assert part in message
    assert SIGNATURES["custom_rm_path"] in message


@pytest.mark.parametrize(
    "error", ["raise ValueError('my fault')", "raise KeyError('my fault')", "import no_such_thing", "def ("]
)
def test_a_file_that_fails_while_it_is_imported(tmp_path: Path, error: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(error)
    message = check_hook("custom_rm_path", f"{path}:rm")
    assert str(path) in message
    assert "cannot be imported" in message
    assert error.startswith("raise") is ("my fault" in message)
    path.write_text("def rm(args, sample): return 0.0")  # mended in the same process, it loads
    assert check_hook("custom_rm_path", f"{path}:rm") is None


def test_keywords_of_the_call_are_checked(module: str) -> None:
    message = check_hook("rollout_function_path", f"{module}:rollout")
    assert "evaluation" in message
    assert check_hook("data_source_path", f"{module}:Source") is None


@pytest.mark.parametrize("field", SIGNATURES)
def test_every_hook_is_checked_before_a_run(tmp_path: Path, field: str) -> None:
    file = tmp_path / f"for_{field}.py"
    is_async = "async " * (field == "custom_generate_function_path")
    file.write_text(f"def nothing(): ...\n{is_async}def anything(*args, **kwargs): ...\n")
    flag = "--" + field.replace("_", "-")
    assert check_hook(field, f"{file}:anything") is None
    for path, part in ((f"{file}:nothing", "its signature () does not fit"), (f"{file}:lost", "has no 'lost'")):
        message = str(check_hook(field, path))
        assert message.startswith(flag) and path in message and part in message
        assert f"expected {SIGNATURES[field]}" in message
    namespace = read_args([flag, f"{file}:nothing"])[0]
    assert any(f"{flag} {file}:nothing: its signature" in error for error in validate(namespace)[1])


def test_a_hook_that_needs_megatron_lm_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "needs_megatron_lm.py"
    file.write_text("from megatron.training import get_args\ndef hook(args, sample): ...\n")
    with pytest.raises(ValueError, match=r"megatron.training is Megatron-LM's and no part of megatron-core"):
        load_function(f"{file}:hook")


def test_a_hook_that_imports_a_module_of_ours_that_moved_gets_the_public_place(tmp_path: Path) -> None:
    file = tmp_path / "older.py"
    file.write_text("from fusionrl.rollout.state import GenerateState\ndef hook(args, sample): ...\n")
    with pytest.raises(ValueError, match=r"fusionrl\.plugin_api"):
        load_function(f"{file}:hook")


ASYNC = """
import asyncio
import functools
from collections.abc import Awaitable

def plain(args, sample, params): return sample
async def good(args, sample, params): return sample
def annotated(args, sample, params) -> Awaitable[object]: return good(args, sample, params)
@functools.wraps(good)
def wrapped(args, sample, params): return good(args, sample, params)
part = functools.partial(good)
class Called:
    async def __call__(self, args, sample, params): return sample
called = Called()
class Agent:
    def __call__(self, args, sample, params): return good(args, sample, params)
    def generate(self, args, sample, params): return good(args, sample, params)
    async def best(self, args, sample, params): return sample
    def promised(self, args, sample, params) -> Awaitable[object]: return good(args, sample, params)
class Said:
    def __call__(self, args, sample, params) -> Awaitable[object]: return self.made
class Wrapper:
    def __init__(self, function): functools.update_wrapper(self, function)
    def __call__(self, *args): return self.__wrapped__(*args)
agent, said, method, best, promised = Agent(), Said(), Agent().generate, Agent().best, Agent().promised
by_class, part_of_by_class = Wrapper(good), functools.partial(Wrapper(good))
part_of_plain, part_of_method = functools.partial(plain), functools.partial(method)
def decorator(function):
    def run(*args): return function(*args)
    return run
decorated, in_a_lambda = decorator(good), lambda args, sample, params: good(args, sample, params)
part_of_wrapped, part_of_decorated = functools.partial(wrapped), functools.partial(decorated)
def synchronous(function):
    @functools.wraps(function)
    def run(*args, **kwargs): return asyncio.run(function(*args, **kwargs))
    return run
async def keep(args, samples, **kw): return True
class Keeper:
    async def __call__(self, args, samples, **kw): return True
keeper, part_of_keep, part_of_keeper = Keeper(), functools.partial(keep), functools.partial(Keeper())
@synchronous
async def keep_now(args, samples, **kw): return True
part_of_keep_now = functools.partial(keep_now)
async def rm(args, sample, **kw): return 1.0
async def hook(args, sample, *, rollout_id, evaluation): return None
"""


@pytest.mark.parametrize(
    ("name", "is_good"),
    [
        *(("good", True), ("annotated", True), ("wrapped", True), ("part", True), ("called", True)),
        *(("best", True), ("said", True), ("promised", True), ("decorated", True), ("in_a_lambda", True)),
        *(("part_of_wrapped", True), ("part_of_decorated", True), ("by_class", True), ("part_of_by_class", True)),
        *(("plain", False), ("agent", False), ("method", False), ("part_of_plain", False), ("part_of_method", False)),
    ],
)
def test_a_generate_function_must_be_async(tmp_path: Path, name: str, is_good: bool) -> None:
    file = tmp_path / "generates.py"
    file.write_text(ASYNC)
    message = check_hook("custom_generate_function_path", f"{file}:{name}")
    assert (message is None) is is_good
    if message is not None:
        assert f"--custom-generate-function-path {file}:{name}: it is not async; write async def" in message


def test_nobody_awaits_the_other_functions(tmp_path: Path) -> None:
    file = tmp_path / "filters.py"
    file.write_text(ASYNC)
    for name in ("keep", "keeper", "part_of_keep", "part_of_keeper"):
        message = check_hook("dynamic_sampling_filter_path", f"{file}:{name}")
        assert message is not None and "it is async, but its result is not awaited" in message
    for name in ("keep_now", "part_of_keep_now"):
        assert check_hook("dynamic_sampling_filter_path", f"{file}:{name}") is None, "asyncio.run awaits it"
    assert check_hook("custom_rm_path", f"{file}:rm") is None
    assert check_hook("rollout_sample_hook_path", f"{file}:hook") is None


def test_a_file_without_its_function_is_told_with_its_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward_of_m6.py").write_text("def reward(args, sample, **kw): return 1.0\ndef _own(): ...\n")
    message = str(check_hook("custom_rm_path", "my_reward_of_m6.py"))
    assert "'my_reward_of_m6.py' is a file; name the function, too: my_reward_of_m6.py:reward;" in message
    message = str(check_hook("custom_rm_path", "my_reward_of_m6.reward"))
    assert "the current folder is not searched for modules: write my_reward_of_m6.py:reward" in message
    message = str(check_hook("custom_rm_path", "my_reward_of_m6.py:rewards"))
    assert "has no 'rewards'; it has reward" in message
    (tmp_path / "two.py").write_text("def a(): ...\nclass B: ...\n")
    assert "two.py:a (it has a, B)" in str(check_hook("custom_rm_path", str(tmp_path / "two.py")))
    assert "path/to/file.py:function" in str(check_hook("custom_rm_path", "nowhere.py"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "own.py").write_text("def f(): ...\n")
    assert "write folder/own.py:f" in str(check_hook("custom_rm_path", "folder.own.f"))


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ("response, label", "response and label"),
        ("completions, **kwargs", "completions"),
        ("data_source, solution_str, ground_truth=None, extra_info=None", "data_source and solution_str"),
        ("args, ground_truth", "ground_truth"),
    ],
)
def test_a_reward_function_of_another_framework_is_named(tmp_path: Path, parameters: str, named: str) -> None:
    """Bound by position it would run, and compare flags with a sample."""
    path = tmp_path / "foreign.py"
    path.write_text(f"def rm({parameters}, **more): return 1.0\n".replace("**kwargs, **more", "*rest, **more"))
    message = str(check_hook("custom_rm_path", f"{path}:rm"))
    assert f"another framework: {named} would be bound by position to args and sample" in message
    assert "read sample.prompt, sample.response and sample.label; expected" in message
    path = tmp_path / "ours.py"
    path.write_text("def rm(args, sample, response=None, label=None): return 1.0\ndef any_name(a, s): return 1.0\n")
    assert check_hook("custom_rm_path", f"{path}:rm") is None
    assert check_hook("custom_rm_path", f"{path}:any_name") is None


def test_a_hook_may_import_parsers_of_sglang(tmp_path: Path) -> None:
    """SGLang imports triton, which a machine without CUDA need not have."""
    path = tmp_path / "parses.py"
    path.write_text(
        "from sglang.srt.function_call.function_call_parser import FunctionCallParser\n"
        "def rm(args, sample, **kwargs): return 'qwen25' in FunctionCallParser.ToolCallParserEnum\n"
    )
    code = f"from fusionrl.config.hooks import load_function; print(load_function('{path}:rm')(None, None))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


BY_INPUT = """
async def generate(input): ...
def synchronous(input): return input.sample
class Made:
    async def __call__(self, input): ...
class Blocks:
    def __call__(self, input): return input.sample
class Rollout:
    def __init__(self, input): ...
class Bare: ...
class More:
    def __init__(self, input, other): ...
"""


def test_functions_of_one_input_are_checked_as_they_are_called(tmp_path: Path) -> None:
    """As miles calls them: a class is made an object first, of an input where it is a rollout function."""
    file = tmp_path / "by_input.py"
    file.write_text(BY_INPUT)
    generate, rollout, evaluate = "custom_generate_function_path", "rollout_function_path", "eval_function_path"
    for field, name in ((generate, "generate"), (generate, "Made"), (rollout, "Rollout"), (evaluate, "Rollout")):
        assert check_hook(field, f"{file}:{name}") is None, (field, name)
    for field, name, told in (
        (generate, "synchronous", "it is not async"),
        (generate, "Blocks", "it is not async"),
        (generate, "Rollout", "missing a required argument: 'input'"),
        (rollout, "Bare", "too many positional arguments"),
        (rollout, "More", "missing a required argument: 'other'"),
        (rollout, "generate", "too many positional arguments"),
        ("custom_rm_path", "generate", "too many positional arguments"),
    ):
        assert told in str(check_hook(field, f"{file}:{name}")), (field, name)
