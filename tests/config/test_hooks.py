"""Hooks: how they are found, and what is said of one that cannot be loaded or called."""

from pathlib import Path

import pytest

from fusionrl.checks.validate import validate
from fusionrl.config.hooks import SIGNATURES, check_hook, flag_of, load_function
from fusionrl.config.parser import read_args
from tests.own_process import run_code

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


def test_the_defaults_fit_their_own_signatures() -> None:
    for field, path in (
        ("rollout_function_path", "rollout.sft_rollout.generate_rollout"),
        ("custom_generate_function_path", "rollout.sglang_rollout.generate"),
        ("data_source_path", "buffer.data_source.RolloutDataSource"),
    ):
        assert check_hook(field, f"fusionrl.{path}") is None


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("nothing_of_that_name.rm", "No module named 'nothing_of_that_name'"),
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
    assert all(text in message for text in ("--custom-rm-path", path, part, SIGNATURES["custom_rm_path"]))


@pytest.mark.parametrize(
    "error", ["raise ValueError('my fault')", "raise KeyError('my fault')", "import no_such_thing", "def ("]
)
def test_a_file_that_fails_while_it_is_imported(tmp_path: Path, error: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(error)
    message = check_hook("custom_rm_path", f"{path}:rm")
    assert str(path) in message and "cannot be imported" in message
    assert error.startswith("raise") is ("my fault" in message)
    path.write_text("def rm(args, sample): return 0.0")  # mended in the same process, it loads
    assert check_hook("custom_rm_path", f"{path}:rm") is None


def test_every_hook_is_checked_before_a_run(tmp_path: Path) -> None:
    file = tmp_path / "any.py"
    file.write_text("def nothing(): ...\ndef plain(*args, **kwargs): ...\nasync def generate(*args, **kwargs): ...\n")
    for field in SIGNATURES:
        name = "generate" if field == "custom_generate_function_path" else "plain"
        assert check_hook(field, f"{file}:{name}") is None
        assert f"{file}:lost" in (message := str(check_hook(field, f"{file}:lost"))) and "has no 'lost'" in message
    errors = validate(read_args([part for f in SIGNATURES for part in (flag_of(f), f"{file}:nothing")])[0])[1]
    for field, expected in SIGNATURES.items():
        (error,) = (error for error in errors if error.startswith(f"{flag_of(field)} {file}:nothing: its signature ()"))
        assert "does not fit" in error and f"expected {expected}" in error


def test_a_hook_that_imports_what_is_not_there_is_told_the_cure(tmp_path: Path) -> None:
    for name, cure in (
        ("megatron.training", "megatron.training is Megatron-LM's and no part of megatron-core"),
        ("fusionrl.rollout.state", "fusionrl.plugin_api"),
    ):
        file = tmp_path / f"{name}.py"
        file.write_text(f"from {name} import anything\n")
        with pytest.raises(ValueError, match=cure):
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
class Called:
    async def __call__(self, args, sample, params): return sample
class Agent:
    def __call__(self, args, sample, params): return good(args, sample, params)
class Wrapper:
    def __init__(self, function): functools.update_wrapper(self, function)
    def __call__(self, *args): return self.__wrapped__(*args)
called, agent, by_class = Called(), Agent(), Wrapper(good)
part, part_of_plain, part_of_wrapped = map(functools.partial, (good, plain, wrapped))
def decorator(function):
    def run(*args): return function(*args)
    return run
decorated, in_a_lambda = decorator(good), lambda args, sample, params: good(args, sample, params)
async def keep(args, samples, **kw): return True
part_of_keep = functools.partial(keep)
@functools.wraps(keep)
def keep_now(*args, **kwargs): return asyncio.run(keep(*args, **kwargs))
async def rm(args, sample, **kw): return 1.0
async def hook(args, sample, *, rollout_id, evaluation): return None
"""


def test_a_generate_function_must_be_async_and_nobody_awaits_most_others(tmp_path: Path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(ASYNC)
    good = "good annotated wrapped called by_class part part_of_wrapped decorated in_a_lambda"
    for name in good.split():
        assert check_hook("custom_generate_function_path", f"{file}:{name}") is None, name
    for name in ("plain", "agent", "part_of_plain"):
        message = str(check_hook("custom_generate_function_path", f"{file}:{name}"))
        assert f"--custom-generate-function-path {file}:{name}: it is not async; write async def" in message
    message = str(check_hook("dynamic_sampling_filter_path", f"{file}:part_of_keep"))
    assert "it is async, but its result is not awaited" in message
    allowed = {"dynamic_sampling_filter_path": "keep_now", "custom_rm_path": "rm", "rollout_sample_hook_path": "hook"}
    assert not any(check_hook(field, f"{file}:{name}") for field, name in allowed.items())


def test_a_file_without_its_function_is_told_with_its_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for file in ("my_reward_of_m6.py", "folder/own.py"):
        Path(file).write_text("def reward(args, sample, **kw): return 1.0\ndef _own(): ...\n")
    Path("two.py").write_text("def a(): ...\nclass B: ...\n")
    for path, said in (
        ("my_reward_of_m6.py", "is a file; name the function, too: my_reward_of_m6.py:reward;"),
        ("my_reward_of_m6.reward", "the current folder is not searched for modules: write my_reward_of_m6.py:reward"),
        ("my_reward_of_m6.py:rewards", "has no 'rewards'; it has reward"),
        ("two.py", "two.py:a (it has a, B)"),
        ("nowhere.py", "path/to/file.py:function"),
        ("folder.own.reward", "write folder/own.py:reward"),
    ):
        assert said in str(check_hook("custom_rm_path", path)), path


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
    path = tmp_path / "rewards.py"
    ours = "def ours(args, sample, response=None, label=None): ...\ndef any_name(a, s): ...\n"
    path.write_text(f"def rm({parameters}, **more): ...\n{ours}".replace("**kwargs, **more", "*rest, **more"))
    message = str(check_hook("custom_rm_path", f"{path}:rm"))
    assert f"another framework: {named} would be bound by position to args and sample" in message
    assert "rm(args, sample, **kw)" in message and "sample.label" in message
    assert not any(check_hook("custom_rm_path", f"{path}:{name}") for name in ("ours", "any_name"))


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


def test_a_hook_may_import_parsers_of_sglang(tmp_path: Path) -> None:
    """SGLang imports triton, which a machine without CUDA need not have. The package here is a fake."""
    files = {"sglang/__init__.py": "", "sglang/parsers.py": "import triton\n", "parses.py": "import sglang.parsers\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}def rm(args, sample, **kwargs): ...\n")
    code = f"from fusionrl.config.hooks import load_function; load_function('{tmp_path}/parses.py:rm')"
    run_code(code, PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}")
