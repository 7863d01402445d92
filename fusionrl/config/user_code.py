"""Errors of a user's functions: whose fault it was, where in the user's own files, and at which samples."""

import functools
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeGuard

_FRAMEWORK, _PYTHON = str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"]
_NOT_THE_USERS = tuple(os.path.realpath(folder) + os.sep for folder in (_FRAMEWORK, _PYTHON))
# They may be installed from a checkout of their own, outside of site-packages.
_PACKAGES = ("megatron", "sglang", "sglang_router", "torch", "ray", "transformers", "transformer_engine")

# Faults of a function itself. Anything else may be the consequence of an engine that died.
_OWN_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    SystemExit,
    TypeError,
    ValueError,
)


class SampleLike(Protocol):
    """A `Sample`, as far as this room knows it."""

    index: int | None

    def to_row(self) -> dict[str, object]: ...


class HookError(RuntimeError):
    """A user's function raised, or returned what does not fit.

    The message names the flag, the function and what it said, and shows the user's own lines of the traceback.

    samples    the `Sample`s that it was at, for the process that can write them to a file
    positions  in a trainer: positions in its shard of the samples that it was at; None where that is not known
    is_own_fault  the function itself is wrong; False where it may have failed because an engine died
    """

    is_own_fault = True  # of the class, for what Ray makes of it without calling __init__

    def __init__(self, message: str, samples: Iterable[SampleLike] = (), is_own_fault: bool = True) -> None:
        super().__init__(message)
        self.samples = list(samples)
        self.is_own_fault = is_own_fault
        self.positions: list[int] | None = None

    def add(self, line: str) -> None:
        self.args = (f"{self}\n{line}",)

    def __reduce__(self) -> tuple[object, ...]:
        # The samples stay in the process that has them.
        return type(self), self.args, {"is_own_fault": self.is_own_fault}


class user_code:
    """Turns what the user's code raises within the block into a HookError; a HookError passes unchanged."""

    # A class: a generator's context manager takes a RuntimeError caused by StopIteration for an error of its own.
    def __init__(
        self,
        where: str,
        path: str | None,
        *arguments: object,
        only_theirs: bool = False,
        passing: tuple[type[Exception], ...] = (),
    ) -> None:
        """`where` begins the message (flag and function); samples are looked for in the `arguments` of the function.

        path        the function, as the flag names it
        only_theirs leave errors alone that do not come out of a file of the user's
        passing     leave these alone, too
        """
        self.where, self.path, self.arguments = where, path, arguments
        self.only_theirs, self.passing = only_theirs, passing

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, HookError):
            error.samples = error.samples or samples_in(self.arguments)
        # A user's function may raise anything, and may call exit().
        elif isinstance(error, Exception | SystemExit) and not isinstance(error, self.passing):
            frames = user_frames(error, self.path)
            if frames or not self.only_theirs:
                samples = blamed_samples(error, self.path) or samples_in(self.arguments)
                at = f" at sample {samples[0].index}" if len(samples) == 1 else ""
                message = f"{self.where}: {type(error).__name__}: {error}{at}"
                text = "\n".join(filter(None, [message, frames]))
                raise HookError(text, samples, _is_own_fault(error)) from error


def _is_own_fault(error: BaseException) -> bool:
    if error.__cause__ is not None:
        return _is_own_fault(error.__cause__)
    if isinstance(error, BaseExceptionGroup):
        return any(_is_own_fault(member) for member in error.exceptions)
    return isinstance(error, _OWN_FAULTS)


def user_frames(error: BaseException, path: str | None = None) -> str:
    """The part of a traceback that is in the user's own files, as Python prints it; empty if there is none.

    Frames of fusionrl, of Python and of installed packages are left out. `path` names the function that was called, as
    a flag does: where that is installed itself, its package counts as the user's. Causes and members of an exception
    group are shown where they have frames of their own.
    """
    summary = traceback.TracebackException.from_exception(error)
    home = _home(path)
    _keep_users_frames(summary, home)
    if not _has_frames(summary):
        return ""
    is_alone = not (summary.__cause__ or summary.__context__ or getattr(summary, "exceptions", None))
    return "".join(summary.stack.format() if is_alone else summary.format()).rstrip("\n")


def last_user_line(error: BaseException, path: str | None = None) -> str | None:
    """ "FILE:LINE: code" of the user's innermost frame."""
    home = _home(path)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename, home)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else None


def blamed_samples(error: BaseException, path: str | None = None) -> list[SampleLike]:
    """The samples that are variables of the user's innermost frame that has some."""
    home = _home(path)
    errors = [error]
    for link in errors:
        errors += getattr(link, "exceptions", ())
        frames = [frame for frame, _ in traceback.walk_tb(link.__traceback__)]
        for frame in reversed(frames):
            if _is_users(frame.f_code.co_filename, home):
                samples = {id(value): value for value in frame.f_locals.values() if _is_sample(value)}
                if samples:
                    return list(samples.values())
    return []


def samples_in(values: Iterable[object]) -> list[SampleLike]:
    """The samples among arguments, also in lists, each once."""
    samples: dict[int, SampleLike] = {}
    for value in values:
        if _is_sample(value):
            samples[id(value)] = value
        elif isinstance(value, list | tuple):
            samples |= {id(sample): sample for sample in samples_in(value)}
    return list(samples.values())


def _is_sample(value: object) -> TypeGuard[SampleLike]:
    # By its method: `Sample` belongs to the room `data`, which this room may not import.
    return callable(getattr(type(value), "to_row", None))


def _keep_users_frames(summary: traceback.TracebackException, home: str | None) -> None:
    frames = [frame for frame in summary.stack if _is_users(frame.filename, home)]
    summary.stack = traceback.StackSummary.from_list(frames)
    for name in ("__cause__", "__context__"):
        linked = getattr(summary, name)
        if linked is not None:
            _keep_users_frames(linked, home)
            if not _has_frames(linked):
                setattr(summary, name, None)
    for member in getattr(summary, "exceptions", None) or ():
        _keep_users_frames(member, home)


def _has_frames(summary: traceback.TracebackException) -> bool:
    linked = filter(None, [summary.__cause__, summary.__context__, *(getattr(summary, "exceptions", None) or ())])
    return bool(summary.stack) or any(map(_has_frames, linked))


def _is_users(file: str, home: str | None) -> bool:
    if file.startswith("<"):  # <frozen importlib>, <string>
        return False
    file = os.path.realpath(file)
    if home is not None and file.startswith(home):
        return True
    parts = file.split(os.sep)
    return (
        not file.startswith((*_NOT_THE_USERS, *_folders_of_packages()))
        and "site-packages" not in parts
        and "dist-packages" not in parts
    )


@functools.cache
def _folders_of_packages() -> tuple[str, ...]:
    """The folders of the packages that fusionrl runs on; found without importing them."""
    # A stand-in for a package, as some CPU set-ups have it, is loaded without a spec, and None says that a package is
    # not to be found; then there is nothing to find.
    there = [
        name
        for name in _PACKAGES
        if name not in sys.modules or getattr(sys.modules[name], "__spec__", None) is not None
    ]
    specs = [importlib.util.find_spec(name) for name in there]
    folders = [folder for spec in specs if spec is not None for folder in spec.submodule_search_locations or ()]
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


def _home(path: str | None) -> str | None:
    """The folder of the installed package that the function `path` is of; None for fusionrl's own and for files."""
    if path is None or ":" in path:
        return None
    top = path.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # not there, or a module without a spec: then nothing is known of it
        return None
    if spec is None or spec.origin is None or top == "fusionrl":
        return None
    # A single-file module lies among other packages in site-packages.
    is_package = spec.submodule_search_locations is not None
    return os.path.realpath(os.path.dirname(spec.origin)) + os.sep if is_package else os.path.realpath(spec.origin)
