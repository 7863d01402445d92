"""Run a Python program of a launch script in the sandbox: `launcher.py FILE`, `-c CODE` or `-`. Standard library only.

A module that is neither in the checkout nor in the standard library has unknown members. Helpers of slime and miles
start runs without the cluster around them. The launch script itself, and modules of the checkout, are run statement by
statement: one that raises is passed over. If the launch script started no run, the functions in it that start runs are
called with the defaults of their parameters.
"""

from __future__ import annotations
import __future__

import ast
import dataclasses
import importlib
import importlib.abc
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from typing import Any

BOX, LOG, SCRIPT = (os.environ.get(name, "") for name in ("BOX", "BOX_LOG", "BOX_SCRIPT"))
VALUES: dict[str, str] = json.loads(os.environ.get("BOX_VALUES", "{}"))
_MAX_SLEEPS = 1000


def note(text: str) -> None:
    """Say something about the launch script; of modules that it imports, nothing is said."""
    if not _Lenient.depth:
        with open(os.path.join(LOG, "notes"), "a", encoding="utf-8") as file:
            file.write(text + "\0")


# ------------------------------------------------------------------------------------------------ what is not known
class Unknown(str):
    """A value that only the machine of the run has: `${NAME}` as text, false as a condition."""

    _name: str

    def __new__(cls, name: str) -> Unknown:
        name = re.sub(r"\W+", "_", name.replace(BOX, "")).strip("_")[:60] or "VALUE"
        value = super().__new__(cls, f"\ue000\ue124{{{name}}}\ue001")  # U+E124: the $, for bash
        value._name = name
        return value

    def __getattr__(self, name: str) -> Unknown:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return Unknown(f"{self._name}.{name}")

    def __call__(self, *arguments: object, **named: object) -> object:
        if len(arguments) == 1 and isinstance(arguments[0], (types.FunctionType, type)):
            return arguments[0]  # a decorator
        return Unknown(" ".join(map(str, (self._name, *arguments))))

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        if frame.f_code.co_filename == SCRIPT:
            note(f"`{self._name}` (line {frame.f_lineno}) is taken as false: it is not known")
        return False

    def __add__(self, operand: object) -> str:
        return super().__add__(operand) if isinstance(operand, str) else self._with(operand)

    def _with(self, operand: object) -> Unknown:
        return Unknown(f"{self._name} {operand}")

    def __format__(self, form: str) -> str:
        return str(self)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __exit__(self, *error: object) -> None:
        """Let an error pass."""

    __hash__ = str.__hash__
    __repr__ = __fspath__ = str.__str__
    __enter__ = lambda self: self  # noqa: E731
    __len__ = lambda self: 0  # noqa: E731
    __mro_entries__ = lambda self, bases: ()  # noqa: E731
    __getitem__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __or__ = __ror__ = _with
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _with
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _with  # type: ignore


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module that no other finder has: its members are unknown."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        is_standard = name.partition(".")[0] in sys.stdlib_module_names
        return None if is_standard else ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__getattr__"] = Unknown(module.__name__).__getattr__


class _Lenient(SourceFileLoader):
    """Loads a module of the checkout as far as it goes."""

    depth = 0

    def exec_module(self, module: types.ModuleType) -> None:
        _Lenient.depth += 1
        try:
            run_statements(self.path, module)
        finally:
            _Lenient.depth -= 1


def _hook(folder: str) -> FileFinder:
    if not (folder.startswith(BOX) and os.path.isdir(folder)):
        raise ImportError(folder)
    return FileFinder(folder, (_Lenient, [".py"]))


class _Guard(ast.NodeTransformer):
    """Passes over a call or an `assert` that raises, and names it."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        return node if isinstance(node.value, ast.Constant) else _guarded(node)

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return _guarded(node)


def _guarded(node: ast.stmt) -> ast.stmt:
    call = f"_pass_over('line {node.lineno}', _raised)"
    guarded: Any = ast.parse(f"try: pass\nexcept (Exception, SystemExit) as _raised: {call}").body[0]
    guarded.body = [node]
    return guarded


def run_statements(path: str, module: types.ModuleType) -> ast.Module:
    """Run a file; a statement of it that raises, or a call within a function, is passed over. Return its tree."""
    with open(path, encoding="utf-8") as file:
        tree, source = ast.parse(text := file.read()), ast.parse(text)
    future = __future__.annotations.compiler_flag if "from __future__ import annotations" in text else 0
    module.__dict__["_pass_over"] = _pass_over
    for node in _Guard().visit(tree).body:
        statement = ast.fix_missing_locations(ast.Module([node], []))
        attempt(f"line {node.lineno}", exec, compile(statement, path, "exec", flags=future), module.__dict__)
    return source


class Waits(BaseException):
    """The program waits for something that is not here; a loop that passes over errors ends by it."""


def attempt(part: str, action: Callable[..., object], *arguments: object) -> None:
    """Call a function; one that raises is passed over, and named."""
    try:
        action(*arguments)
    except (Exception, SystemExit, Waits) as error:
        _pass_over(part, error)


def _pass_over(part: str, error: BaseException) -> None:
    if not isinstance(error, SystemExit) or error.code not in (0, None):
        note(f"{part} is passed over: it raises {type(error).__name__}: {error}")


# ---------------------------------------------------------------------------------------- helpers of slime, miles
def _bash(command: str, capture_output: bool = False, **_: object) -> str | None:
    done = subprocess.run(
        ["bash", "-c", str(command)], env=os.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    return done.stdout if capture_output else None


def _execute_train(
    train_args: str,
    num_gpus_per_node: object = None,
    megatron_model_type: str | None = None,
    train_script: str = "train.py",
    before_ray_job_submit: object = None,
    extra_env_vars: dict[str, object] | None = None,
    **_: object,
) -> None:
    source, model = _model_args(megatron_model_type)
    variables = {name: str(value) for name, value in (extra_env_vars or {}).items()}
    env = shlex.quote(json.dumps({"env_vars": variables}, ensure_ascii=False))
    _bash(f"{source} ray job submit --runtime-env-json={env} -- python3 {train_script} {model} {train_args}")


def _model_args(model_type: str | None) -> tuple[str, str]:
    """Return a command before the launch, and its words: the flags of the model's shape, from scripts/models."""
    if model_type is None:
        return "", ""
    for folder in _folders():
        stem = os.path.join(folder, "scripts", "models", str(model_type))
        if os.path.isfile(stem + ".sh"):
            return f"source {shlex.quote(stem + '.sh')};", "${MODEL_ARGS[@]}"
        if os.path.isfile(stem + ".py"):
            utils = importlib.import_module("miles.utils.external_utils.model_args_utils")
            sys.modules.setdefault("model_args_utils", utils)
            return "", " ".join(map(shlex.quote, runpy.run_path(stem + ".py")["model_args"]().split()))
    note(f"scripts/models has no {model_type}: the model's flags are not known; config.json has the shape")
    return "", ""


def _save_to_temp_file(text: str, ext: str = "yaml") -> str:
    stem = os.path.basename(SCRIPT).removesuffix(".py")
    number = 1
    while os.path.exists(path := f"{stem}.{number}.{ext}"):
        number += 1
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


@dataclasses.dataclass
class ExecuteTrainConfig:
    """slime's base class of a launcher's parameters, for a launcher outside of a checkout."""

    cuda_core_dump: bool = False
    num_nodes: int = 1
    extra_env_vars: str = ""


HELPERS: dict[str, object] = {
    "execute_train": _execute_train,
    "get_default_wandb_args": lambda *_, **__: "",  # without WANDB_API_KEY it is so
    "create_run_id": lambda: Unknown("RUN_ID"),
    "encode_pseudo_file": _save_to_temp_file,
    "save_to_temp_file": _save_to_temp_file,
    "dataclass_cli": lambda function=None, **_: function or (lambda decorated: decorated),
    **dict.fromkeys(("exec_command", "exec_command_cpu", "exec_command_gpu", "exec_command_multi_node"), _bash),
    **dict.fromkeys(
        ("convert_checkpoint", "hf_download_dataset", "rsync_simple", "fp8_cast_bf16", "start_mooncake_master"),
        lambda *_, **__: None,
    ),
}


def _put_helpers() -> None:
    """Replace the helpers that act on a cluster: in the checkout's modules, or where it has none."""
    for package in ("slime", "miles"):
        for name in ("external_utils.command_utils", "external_utils.exec_command", "misc"):
            module = importlib.import_module(f"{package}.utils.{name}")
            if isinstance(module.__loader__, _Missing):
                module.__dict__.update(HELPERS, ExecuteTrainConfig=ExecuteTrainConfig)
            else:
                module.__dict__.update({key: HELPERS[key] for key in HELPERS if hasattr(module, key)})


# ------------------------------------------------------------------------------------------------ typer, YAML
class _Typer:
    """`typer.Typer()`: its commands stay functions."""

    def __init__(self, *_: object, **__: object) -> None:
        self.command = self.callback = lambda *_, **__: lambda function: function

    def __call__(self, *_: object, **__: object) -> None:
        """Leave the commands to `start`."""


def _option(default: object = ..., *_: object, **named: object) -> object:
    return named.get("default", default)


def _dump(content: object, file: Any = None, **_: object) -> str | None:
    text = json.dumps(content, default=str, ensure_ascii=False)  # JSON is YAML
    return text if file is None else file.write(text)


# ------------------------------------------------------------------------------------------------ the launch script
def start(path: str) -> None:
    """Run the launch script; if it starts no run, call the functions in it that start runs."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = path
    roots, inner = _starting(run_statements(path, module))
    if not _has_launched():
        for name in roots:
            attempt(f"{name}()", enter, module.__dict__.get(name))
    for name in inner:
        if not _has_launched():
            attempt(f"{name}()", enter, module.__dict__.get(name))


def _starting(tree: ast.Module) -> tuple[list[str], list[str]]:
    """Return the functions that start runs and that no other of them calls, and the others."""
    functions = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    calls = {
        name: {ast.unparse(call.func).rpartition(".")[2] for call in ast.walk(node) if isinstance(call, ast.Call)}
        for name, node in functions.items()
    }
    starting = {name for name, node in functions.items() if "train.py" in ast.unparse(node)}
    starting |= {name for name, called in calls.items() if "execute_train" in called}
    for _ in functions:
        starting |= {name for name, called in calls.items() if called & starting}
    inner = {name for caller in starting for name in calls[caller] - {caller}}
    names = [name for name in functions if name in starting]
    return [name for name in names if name not in inner], [name for name in names if name in inner]


def _has_launched() -> bool:
    for name in os.listdir(LOG):
        if name.endswith(".argv"):
            with open(os.path.join(LOG, name), encoding="utf-8") as file:
                if re.search(r"(^|/|\0)train(_async)?\.py\0", file.read()):
                    return True
    return False


def enter(function: Callable[..., object]) -> None:
    """Call a function with the user's values for its parameters, and its defaults."""
    hints = typing.get_type_hints(function)
    arguments: dict[str, object] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints.get(name)
        if dataclasses.is_dataclass(kind):
            fields = {field.name: field.default for field in dataclasses.fields(kind) if field.init}
            factories = {field.name for field in dataclasses.fields(kind) if callable(field.default_factory)}
            missing = {key for key in fields.keys() - factories if fields[key] is dataclasses.MISSING}
            values = {key: _as(fields[key], text) for key, text in VALUES.items() if key in fields}
            arguments[name] = kind(**{key: Unknown(key) for key in missing} | values)  # type: ignore[operator]
        elif name in VALUES:
            arguments[name] = _as(parameter.default, VALUES[name])
        elif parameter.default in (parameter.empty, ...) and "*" not in str(parameter):
            arguments[name] = Unknown(name)
    function(**arguments)


def _as(default: object, text: str) -> object:
    """Return a user's value as a parameter with that default has it."""
    if isinstance(default, bool) or text.lower() in ("true", "false"):
        return text.lower() in ("true", "1")
    return text if isinstance(default, str) or not re.fullmatch(r"-?\d+", text) else int(text)


def _folders() -> list[str]:
    """Return the folders around the launch script, up to the root."""
    folders = [os.path.dirname(SCRIPT)]
    while len(parent := os.path.dirname(folders[-1])) > len(BOX):
        folders.append(parent)
    return folders


def _prepare(argv: Sequence[str]) -> None:
    """Put what a program finds around it in place: modules, the environment, time, files that stay."""
    sys.path[:], sys.argv[:] = [*_folders(), *sys.path[1:]], argv
    sys.executable = os.path.join(os.environ["BOX_HOME"], "bin", "python3")
    sys.path_hooks.insert(0, _hook)
    sys.path_importer_cache.clear()
    sys.meta_path.append(_Missing())
    stand_ins: dict[str, dict[str, object]] = {"yaml": {"dump": _dump, "safe_dump": _dump}}
    stand_ins["typer"] = {"run": enter, "Typer": _Typer, "Option": _option, "Argument": _option}
    for name, members in stand_ins.items():
        importlib.import_module(name).__dict__.update(members)
    sleeps = iter(range(_MAX_SLEEPS))

    def sleep(seconds: object) -> None:
        if next(sleeps, None) is None:
            raise Waits("it waits for something that is not here")

    open_process = subprocess.Popen.__init__

    def open_by_bash(self: Any, *arguments: Any, **named: Any) -> None:
        open_process(self, *arguments, **({"executable": "bash"} if named.get("shell") else {}) | named)

    make_file, get_item = tempfile.NamedTemporaryFile, os._Environ.__getitem__

    def value_of(environment: os._Environ[str], name: str) -> str:
        try:
            return get_item(environment, name)
        except KeyError:
            if sys._getframe(1).f_code.co_filename.startswith(BOX):
                return Unknown(name)  # `os.environ[name]` of a launcher; `get` and `in` know that it is not set
            raise

    time.sleep, os.system = sleep, lambda command: subprocess.call(command, shell=True)
    subprocess.Popen.__init__ = open_by_bash  # type: ignore
    tempfile.NamedTemporaryFile = lambda *rest, **named: make_file(*rest, **named | {"delete": False})
    os._Environ.__getitem__ = value_of  # type: ignore


def main(argv: Sequence[str]) -> None:
    """Run a program."""
    program, *rest = argv or ["-"]
    _prepare([program, *rest])
    if program == SCRIPT:
        _put_helpers()
        start(program)
    elif program in ("-c", "-"):
        code = rest[0] if program == "-c" else sys.stdin.read()
        exec(compile(code, os.path.join(BOX, "inline"), "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
