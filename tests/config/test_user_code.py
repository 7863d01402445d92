"""Errors of a user's functions: their own lines of the traceback, and the samples that they were at."""

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

import fusionrl
from fusionrl.config.hooks import HookError, awaited_hook, user_code
from fusionrl.data.sample import Sample

HOOKS = """
import asyncio, json
from helper import divide
def direct(args, samples):
    return divide(samples)
def in_a_library(args, samples):
    return json.loads(samples[0].response)
def from_another(args, samples):
    try:
        divide(samples)
    except ZeroDivisionError as error:
        raise ValueError("no ratio") from error
def leaves(args, samples):
    exit(3)
def stops(args, samples):
    return next(iter([]))
async def in_a_group(args, samples):
    async def one(sample):
        raise KeyError(sample.index)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one(samples[1]))
def reaches_nobody(args, samples):
    try:
        raise ConnectionRefusedError("no engine")
    except OSError as error:
        raise ValueError("no answer") from error
"""
RATIO = "    return [len(sample.tokens) / len(sample.response) for sample in samples]"


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text(f"\ndef divide(samples):\n{RATIO}\n")
    (tmp_path / "hooks.py").write_text(HOOKS)
    return tmp_path / "hooks.py"


def raised(hooks: Path, name: str) -> HookError:
    group = [Sample(index=i, response="x" * (2 - i)) for i in range(3)]
    with pytest.raises(HookError) as caught:
        asyncio.run(awaited_hook("dynamic_sampling_filter_path", f"{hooks}:{name}", None, group))
    return caught.value


def test_the_users_lines_are_shown_and_no_others(hooks: Path) -> None:
    error = raised(hooks, "direct")
    assert str(error).splitlines() == [
        f"--dynamic-sampling-filter-path {hooks}:direct: ZeroDivisionError: division by zero at sample 2",
        f'  File "{hooks}", line 5, in direct',
        "    return divide(samples)",
        "           ^^^^^^^^^^^^^^^",
        f'  File "{hooks.with_name("helper.py")}", line 3, in divide',
        RATIO,
        "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        f'  File "{hooks.with_name("helper.py")}", line 3, in <listcomp>',
        RATIO,
        "            ~~~~~~~~~~~~~~~~~~~^~~~~~~~~~~~~~~~~~~~~~",
    ]
    assert [sample.index for sample in error.samples] == [2], "the sample of the innermost line"


def test_lines_of_libraries_are_left_out_and_causes_and_groups_are_shown(hooks: Path) -> None:
    error = raised(hooks, "in_a_library")
    assert "JSONDecodeError" in str(error) and "in in_a_library" in str(error)
    assert str(error).count("File ") == 1
    assert [sample.index for sample in error.samples] == [0, 1, 2], "which one is not known: all that it was given"
    text = str(raised(hooks, "from_another"))
    assert "no ratio" in text.splitlines()[0] and "direct cause" in text and "in divide" in text
    error = raised(hooks, "in_a_group")
    assert "KeyError: 1" in str(error) and "in one" in str(error)
    assert [sample.index for sample in error.samples] == [1]


def test_errors_that_would_end_something_else(hooks: Path) -> None:
    for name, said in (("leaves", "SystemExit: 3"), ("stops", "StopIteration")):
        text = str(raised(hooks, name))
        assert said in text and f"in {name}" in text


@pytest.mark.parametrize("name", ["direct", "from_another", "in_a_group", "reaches_nobody"])
def test_it_travels_with_whose_fault_it_was_and_without_its_samples(hooks: Path, name: str) -> None:
    """A mistake is the function's own; that nobody answers may be the consequence of an engine that died."""
    error = raised(hooks, name)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is HookError and str(back) == str(error) and back.samples == []
    assert back.is_own_fault == (name != "reaches_nobody")


def test_an_error_of_an_inner_function_goes_on_as_it_is(hooks: Path) -> None:
    """It names itself; the outer call adds the sample where the inner one had none."""
    sample = Sample(index=4)
    with pytest.raises(HookError, match="^inner: the message$") as caught, user_code("outer", None, sample):
        raise HookError("inner: the message")
    assert caught.value.samples == [sample]
    with pytest.raises(LookupError), user_code("outer", None, passing=(LookupError,)):
        raise KeyError("handed on")


def test_errors_that_are_not_theirs(hooks: Path) -> None:
    """In a block around the framework's code, only what comes out of a user's file is turned into a HookError."""
    with pytest.raises(HookError, match="^x: KeyError: 'here'"), user_code("x", None, only_theirs=True):
        raise KeyError("here")  # this test is a user's file
    assert is_left_alone.__code__.co_filename.startswith(FRAMEWORK)
    with pytest.raises(ValueError, match="of the framework"):
        is_left_alone()


FRAMEWORK = str(Path(fusionrl.__file__).parent)
INSIDE = """
def is_left_alone():
    with user_code("x", None, only_theirs=True):
        raise ValueError("of the framework")
"""
names: dict[str, Any] = {"user_code": user_code}
exec(compile(INSIDE, f"{FRAMEWORK}/train.py", "exec"), names)  # as if it stood in that file
is_left_alone = names["is_left_alone"]
