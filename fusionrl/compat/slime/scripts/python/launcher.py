"""Launchers in Python: the commands by which they start runs, as texts of a shell. They are read, never run.

What slime's and miles' own helpers do (`execute_train`, `exec_command`, …) is known here; others are read from the
checkout around the launcher.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from fusionrl.compat.slime.scripts.launch import scripts_within
from fusionrl.compat.slime.scripts.python.reader import READ, Reader
from fusionrl.compat.slime.scripts.python.values import (
    NATIVE,
    Class,
    Field,
    Function,
    Instance,
    Name,
    PythonError,
    Scope,
    Unknown,
    Value,
)

_MAX_FILE = 400_000  # bytes of a module that is read
_BUILTINS: dict[str, Callable[..., Value]] = {
    helper.__name__: helper
    for helper in (
        *(str, int, float, bool, len, min, max, sum, any, all, sorted, list, tuple, dict, set, abs, round, repr),
        *(range, enumerate, zip, reversed),
    )
}
# Helpers in command_utils (slime, miles) that launch nothing: a launch needs none of their results.
_PREPARING = ("convert_checkpoint", "hf_download_dataset", "rsync_simple", "fp8_cast_bf16", "start_mooncake_master")
_COMMANDS = ("exec_command", "exec_command_cpu", "exec_command_gpu", "exec_command_multi_node", "system")
_WRITE = "write:"  # before the path of a file of `files`
_DUMPING = ("yaml.safe_dump", "yaml.dump", "json.dump")
_PROCESSES = tuple(f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output", "Popen"))


class Launcher:
    """The reading of one launcher.

    texts  the commands that start a run, in the order of the launcher
    files  files that it writes, with their texts
    """

    def __init__(self, path: str, values: Mapping[str, str], note: Callable[[str], None]) -> None:
        self.path, self.values, self.note = os.path.abspath(path), dict(values), note
        self.texts: list[str] = []
        self.files: dict[str, str] = {}
        self.modules: dict[str, Scope] = {}
        self.reader = Reader(self.call, self.module, self._noted)
        self.num_quiet = 0

    def _noted(self, text: str) -> None:
        if not self.num_quiet:
            self.note(text)

    # -------------------------------------------------------------------------------------------- the launcher
    def read(self, text: str) -> None:
        """Read a launcher as if it were run without arguments; then each function that starts a run, if none did.

        Raises:
            PythonError: it is not Python, or raises before it starts a run.
        """
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise PythonError(f"it is not Python ({error})") from error
        scope: Scope = {"__name__": "__main__", "__file__": self.path}
        try:
            self.reader.block(tree.body, scope, is_lenient=True)
            if not self.texts:
                for name in _roots(tree):
                    self.enter(scope.get(name))
        except RecursionError as error:
            raise PythonError("it is nested too deeply") from error

    def enter(self, function: object) -> None:
        """Call a function with the defaults of its parameters; --set gives them others."""
        if not isinstance(function, Function) or isinstance(function.node, ast.Lambda):
            return
        arguments: dict[str, Value] = {}
        for parameter in function.node.args.args:
            kind = self.reader.value(parameter.annotation, function.scope) if parameter.annotation is not None else None
            if isinstance(kind, Class):
                fields = {
                    name: _as(kind.fields[name], text) for name, text in self.values.items() if name in kind.fields
                }
                arguments[parameter.arg] = self.reader.make(kind, [], fields)
            elif parameter.arg in self.values:
                arguments[parameter.arg] = _as(None, self.values[parameter.arg])
        self.reader.call(function, [], arguments)

    def model_args_with(self, model_type: str, variables: Mapping[str, str]) -> str:
        """Return the flags of a model's shape, read with some variables of the environment."""
        before, self.values = self.values, {**self.values, **variables}
        self.modules.clear()
        try:
            return self.model_args(model_type)
        finally:
            self.values = before

    def model_args(self, model_type: object, arguments: Mapping[str, Value] | None = None) -> str:
        """Return the flags of a model's shape, from scripts/models of the checkout: text for a shell."""
        if model_type is None:
            return ""
        for folder in Path(self.path).parents:
            models = folder / "scripts" / "models"
            if (models / f"{model_type}.py").is_file():
                function = (self._scope_of(models / f"{model_type}.py") or {}).get("model_args")
                text = self.reader.call(function, [], arguments or {})
                if isinstance(text, str):
                    return " ".join(text.split())
        self.note(f"scripts/models has no {model_type}: the model's flags are not known; config.json has the shape")
        return ""

    # -------------------------------------------------------------------------------------------- modules
    def module(self, name: str, importer: str) -> Scope | None:
        """Return the scope of a module of the checkout; None where it has none of that name."""
        if name.partition(".")[0] in sys.stdlib_module_names:
            return None
        start = Path(importer or self.path).parent
        level = len(name) - len(name.lstrip("."))
        parts = [part for part in name.split(".") if part]
        folders = [start, *start.parents][level - 1 : level] if level else [start, *start.parents]
        for folder in folders:
            for file in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
                if parts and file.is_file() and str(file) != self.path:
                    return self._scope_of(file, name.lstrip("."))
        return None

    def _scope_of(self, file: Path, name: str = "") -> Scope | None:
        if str(file) in self.modules:
            return self.modules[str(file)]
        if file.stat().st_size > _MAX_FILE:
            return None
        scope: Scope = {"__name__": name or file.stem, "__file__": str(file)}
        self.modules[str(file)] = scope
        self.num_quiet += 1
        try:
            self.reader.block(ast.parse(file.read_text(encoding="utf-8")).body, scope, is_lenient=True)
        except (OSError, SyntaxError, ValueError):
            pass  # what it has up to there counts; a launcher that needs more does not get it, which is named
        finally:
            self.num_quiet -= 1
        return scope

    # -------------------------------------------------------------------------------------------- calls
    def call(self, path: str, arguments: list[Value], named: dict[str, Value]) -> Value:
        """Return what a function that is not read returns; NotImplemented: it is not known."""
        name = path.rpartition(".")[2]
        if path.startswith(_WRITE):
            self.files[path.removeprefix(_WRITE)] += str(arguments[0])
            return None
        if path.startswith(READ) and name not in (*OF_SLIME, *_PREPARING, *_COMMANDS[:-1]):
            return NotImplemented
        if path.startswith("builtins."):
            return self._builtin(name, arguments, named)
        if path.startswith(("os.", "environ")) or path == "getenv":
            return self._os(path, arguments)
        if name in HELPERS:
            return HELPERS[name](self, *arguments, **named)
        if name in _PREPARING:
            return None
        if name in _COMMANDS or path in _PROCESSES:
            return self.command(arguments[0] if arguments else named.get("args", named.get("cmd")))
        if name in ("load_model_args", "shell_safe_model_args", "load_sibling_model_args"):
            return self.model_args(arguments[name == "load_sibling_model_args"], named)
        if path in _DUMPING and arguments:
            text = json.dumps(arguments[0], default=str)  # JSON is YAML
            if len(arguments) == 1:
                return text
            return self.reader.call(self.reader.attribute(arguments[1], "write"), [text], {})
        if path in _PURE and arguments:
            is_known = name == "dumps" or isinstance(arguments[0], (str, list))
            return _PURE[path](arguments[0]) if is_known else arguments[0]
        return NotImplemented

    def _builtin(self, name: str, arguments: list[Value], named: dict[str, Value]) -> Value:
        if name in ("getattr", "hasattr", "setattr") and len(arguments) > 1 and isinstance(arguments[0], Instance):
            values, key = arguments[0].values, arguments[1]
            if name == "setattr":
                values[key] = arguments[2]
            has = key in values or key in arguments[0].of.members
            if name == "hasattr":
                return has
            return self.reader.attribute(arguments[0], key) if has or len(arguments) < 3 else arguments[2]
        if name in ("print", "setattr"):
            return None
        if name not in _BUILTINS or named or not all(isinstance(argument, NATIVE) for argument in arguments):
            return NotImplemented
        value = _BUILTINS[name](*arguments)
        return list(value) if name in ("enumerate", "zip", "reversed") else value

    def _os(self, path: str, arguments: list[Value]) -> Value:
        name = path.rpartition(".")[2]
        if name in ("get", "getenv", "setdefault", "environ[]", "pop") and arguments:
            value = self.values.get(arguments[0]) if isinstance(arguments[0], str) else None
            default = (
                Unknown(str(arguments[0])) if name == "environ[]" else arguments[1] if len(arguments) > 1 else None
            )
            return default if value is None else value
        if name == "system":
            return self.command(arguments[0])
        if not arguments or not all(isinstance(argument, (str, PurePosixPath)) for argument in arguments):
            return NotImplemented
        if name in ("abspath", "realpath", "expanduser", "normpath"):
            return str(arguments[0])
        is_known = name in ("join", "dirname", "basename")
        return getattr(os.path, name)(*map(str, arguments)) if is_known else NotImplemented

    def command(self, command: object) -> Value:
        """Keep a command if it starts a run; what it returns is not known."""
        text = shlex.join(map(str, command)) if isinstance(command, (list, tuple)) else command
        if isinstance(text, str) and scripts_within(["bash", text]):
            self.texts.append(text)
        return NotImplemented


def _execute_train(launcher: Launcher, *arguments: Value, **named: Value) -> None:
    """Start a run, as slime's and miles' helper does it: a Ray job of train.py."""
    parts = ("train_args", "num_gpus_per_node", "megatron_model_type", "train_script")
    named = {**dict(zip(parts, arguments, strict=False)), **named}
    model_type = named.get("megatron_model_type")
    if sourced := [
        folder for folder in map(str, Path(launcher.path).parents) if os.path.isfile(_sourced(folder, model_type))
    ]:
        launcher.texts.append(f"source {shlex.quote(_sourced(sourced[0], model_type))}")
    model = "${MODEL_ARGS[@]}" if sourced else launcher.model_args(model_type)
    env = named.get("extra_env_vars")
    variables = {str(key): str(value) for key, value in env.items()} if isinstance(env, dict) else {}
    job = f"--runtime-env-json={shlex.quote(json.dumps({'env_vars': variables}))}"
    script = named.get("train_script") or "train.py"
    launcher.texts.append(f"ray job submit {job} -- python3 {script} {model} {named.get('train_args', '')}")


def _moe_layer_freq(launcher: Launcher, *, nlayers: int, first_k_dense_replace: int) -> str:
    """Return which layers have experts, as miles' model_args_utils.py has it."""
    return json.dumps([int(layer >= first_k_dense_replace) for layer in range(nlayers)]).replace(" ", "")


def _save_to_temp_file(launcher: Launcher, text: Value, ext: str) -> str:
    path = f"{Path(launcher.path).stem}.{len(launcher.files) + 1}.{ext}"
    launcher.files[path] = str(text)
    return path


def _named_temporary_file(launcher: Launcher, *_: Value, suffix: Value = ".txt", **__: Value) -> Instance:
    path = _save_to_temp_file(launcher, "", str(suffix).lstrip("."))
    return Instance(Class("file"), {"name": path, "write": Name(_WRITE + path)})


def _run(launcher: Launcher, *arguments: Value, **named: Value) -> Value:
    """`typer.run(main)`; other functions of that name are processes."""
    if arguments and isinstance(arguments[0], Function):
        launcher.enter(arguments[0])
        return None
    return launcher.command(arguments[0] if arguments else named.get("args"))


def _field(launcher: Launcher, *, default: Value = Unknown(""), default_factory: Value = None, **_: Value) -> Field:  # noqa: B008
    return Field(default_factory, default)


def _option(launcher: Launcher, default: Value = Unknown(""), *_: Value, **named: Value) -> Value:  # noqa: B008
    return named.get("default", default)


def _replace(launcher: Launcher, source: Value, **changes: Value) -> Value:
    return Instance(source.of, source.values | changes) if isinstance(source, Instance) else NotImplemented


# Of slime's and miles' command_utils: known here also where their source is there.
OF_SLIME: dict[str, Callable[..., Value]] = {
    "execute_train": _execute_train,
    "get_default_wandb_args": lambda launcher, *_, **__: "",  # without WANDB_API_KEY it is so
    "create_run_id": lambda launcher: Unknown("RUN_ID"),
    "encode_pseudo_file": lambda launcher, text: _save_to_temp_file(launcher, text, "yaml"),
    "save_to_temp_file": _save_to_temp_file,
}
HELPERS: dict[str, Callable[..., Value]] = OF_SLIME | {
    "moe_layer_freq": _moe_layer_freq,
    "NamedTemporaryFile": _named_temporary_file,
    "run": _run,
    "Path": lambda launcher, *parts: PurePosixPath(*map(str, parts)),
    "field": _field,
    "Option": _option,
    "replace": _replace,
}


def _roots(tree: ast.Module) -> list[str]:
    """Return the functions from which runs are started, and which no other of them calls."""
    functions = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    calls = {
        name: {ast.unparse(call.func).rpartition(".")[2] for call in ast.walk(node) if isinstance(call, ast.Call)}
        for name, node in functions.items()
    }
    starting = {name for name, node in functions.items() if "train.py" in ast.unparse(node)}
    starting |= {name for name, called in calls.items() if "execute_train" in called}
    for _ in functions:
        starting |= {name for name, called in calls.items() if called & starting}
    return [
        name
        for name in functions
        if name in starting and not any(name in calls[caller] for caller in starting - {name})
    ]


def _as(default: object, text: str) -> object:
    """Return a value of --set as a parameter with that default has it."""
    if isinstance(default, bool) or text.lower() in ("true", "false"):
        return text.lower() in ("true", "1")
    if isinstance(default, str):
        return text
    try:
        return int(text)
    except ValueError:
        return text


def _sourced(folder: str, model_type: object) -> str:
    return f"{folder}/scripts/models/{model_type}.sh"


_PURE: dict[str, Callable[[Value], Value]] = {
    "json.dumps": lambda value: json.dumps(value, default=str),
    "json.loads": json.loads,
    "shlex.quote": shlex.quote,
    "shlex.join": shlex.join,
    "textwrap.dedent": textwrap.dedent,
}
