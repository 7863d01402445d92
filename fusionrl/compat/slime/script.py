"""Run a launch script in the sandbox, and keep the slime commands that it starts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from fusionrl.compat.slime.arguments import CLOSE, plain, running, stopped, with_flags
from fusionrl.sandbox import Limits, SandboxError, run_python_sync

_INSIDE = Path(__file__).parent / "inside"
_WALL_S = 30.0
_BYTES: Any = {"memory_bytes": 2 << 30, "file_bytes": 64 << 20, "disk_bytes": 256 << 20}
_LIMITS = Limits(wall_s=2 * _WALL_S, cpu_s=60, num_files=20_000, num_processes=256, **_BYTES)
_MAX_ANSWER = 16 << 20  # bytes
_MAX_LAUNCHES = 50
# Of the checkout that a script may read: files that are looked at and that are copied, and bytes of one and of all.
_MAX_SEEN, _MAX_COPIED, _MAX_FILE, _MAX_CHECKOUT = 50_000, 10_000, 400_000, 64 << 20
_TEXTS = (".sh", ".py", ".yaml", ".yml", ".json", ".txt", ".cfg", ".toml", ".env", ".jinja")

# Variables that bash sets, or that would keep the stand-ins from running.
_OF_BASH = re.compile(
    r"_|BASH\w*|EPOCH\w*|RANDOM|SECONDS|LINENO|FUNCNAME|E?UID|PPID|(OLD)?PWD|IFS|PATH|OPT\w+|PIPESTATUS|SHLVL|OSTYPE"
    r"|REPLY|MAPFILE|LANG|LC_\w+|TMPDIR|SHELL|PS4|PYTHON\w*|LD_\w+"
)
_USED = re.compile(r"\$\{?#?([A-Za-z_]\w*+)(?!\[)")
_SET = re.compile(
    r"(?<![\w$\-{])([A-Za-z_]\w*+)(?:\[[^\]\n]*\])?\+?=(?!\"?\$\{?\1\b)|\bfor\s+([A-Za-z_]\w*)|\bprintf\s+-v\s+(\w+)"
    r"|\b(?:read|mapfile|readarray|getopts)\b([^\n;|<&]*)"
)
_DEFAULTED = re.compile(r"\$\{(\w+)(?:\[[^\]]*\])?:?[-=+]")
# `[ -z "$NAME" ]`, and whether the script ends a few lines below.
_TESTED = re.compile(r"(?<![\w-])-[zn]\s+\"?\$\{?(\w+)(?::?-)?\}?((?:[^\n]*\n){0,4}?[^\n]*\bexit\b)?")
# Variables of the launch's environment that a function does not need here.
_OF_CLUSTER = re.compile(r"_|\w*(PATH|proxy|PROXY)|(PYTHON|CUDA|NCCL|GLOO|RAY|MASTER|OMP|TORCH|SHLVL|OLDPWD|PWD)\w*")


# Programs that start a run, those that start Python, and names of others that train.
_PROGRAM = re.compile(r"(?:.*/)?(train|train_async)\.py")
_RUNNER = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|srun|mpirun|uv|pdm|poetry|ray)")
_TRAINING = re.compile(r"(?:.*/)?\w*(?:train|sft|finetune)\w*\.py")


@dataclass(frozen=True)
class Launch:
    """A command that starts a run."""

    program: str  # `train` or `train_async`
    argv: tuple[str, ...]  # parts that cannot be known are marked (see `arguments`)
    env: str | None = None  # the variables that a Ray job's --runtime-env-json sets, as text


@dataclass
class Script:
    """The launches of a script, and notes on what is unknown."""

    launches: list[Launch] = field(default_factory=list)  # in the order of the script
    notes: list[str] = field(default_factory=list)  # a line for each thing that was taken for granted
    files: dict[str, str] = field(default_factory=dict)  # texts that it writes and that a launch names, by their paths

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)


def read_script(path: str | Path, values: Mapping[str, str] | None = None) -> Script:
    """Run the launch script at `path`, bash or Python, in the sandbox.

    values  variables of the environment, arguments (`{"1": …}`), or parameters of a launcher in Python

    Raises:
        ValueError: the file does not exist or is not a launch script, or this machine has no sandbox.
    """
    file, values = Path(os.path.abspath(path)), values or {}
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            compile(text, str(path), "exec")
    except (OSError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path}: it cannot be read ({error or 'it is nested too deeply'})") from error
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: it is not Python ({error})") from error
    try:
        answer = _run(file, text, values)
    except SandboxError as error:
        raise ValueError(f"{path}: from-slime runs a launch script in the sandbox: {error}") from error
    script = Script()
    if file.suffix != ".py":
        script.notes += [f"${{{name}}} is taken as not set" for name in sorted(_environment(text)[1] - values.keys())]
    errors = re.findall(rf"^.*{re.escape(file.name)}: (line \d+: .*)$", answer.errors, re.MULTILINE)
    for note in (*answer.notes, *errors):
        script.note(note)
    programs = _keep_launches(answer.records, script)
    if not script.launches:
        reasons = [f"it starts {', '.join(dict.fromkeys(programs))}"] if programs else map(plain, script.notes)
        cure = "--set NAME=VALUE gives it a variable, --set 1=VALUE its first argument"
        raise ValueError("; ".join([f"{path}: it starts no train.py and no train_async.py", *reasons, cure]))
    words = [word for launch in script.launches for word in launch.argv]
    for name, content in answer.files.items():
        for form in (name, os.path.relpath(name, file.parent)):
            if content and any(form in word for word in words):
                script.files[form] = content
                break
    _files_as_flags(script, str(file.parent))
    return script


def _keep_launches(records: list[_Record], script: Script) -> list[str]:
    """Put the launches among the recorded commands into `script`; return other programs that train."""
    programs: list[str] = []
    for record in records:
        argv = record.argv
        if (launch := _launch_of(argv)) is not None:
            script.launches.append(launch)
            names = [name for name in record.environment if not _OF_CLUSTER.fullmatch(name)]
            if names and launch.env is None:
                script.note(f"the launch sets {', '.join(names)}: export what your functions need before the command")
        elif argv[0].startswith("--") and script.launches:
            last = script.launches[-1]
            script.launches[-1] = replace(last, argv=(*last.argv, *argv))
            script.note(f"a `\\` is missing before {argv[0]}: it and what follows are taken as arguments of the launch")
        else:
            programs += _programs_of(argv)
    if len(script.launches) > _MAX_LAUNCHES:
        script.launches = list(dict.fromkeys(script.launches))
        script.note("the script starts runs in a loop without an end: each is listed once")
    return programs


def _launch_of(words: Sequence[str]) -> Launch | None:
    """Return the launch that a command is: `python train.py …`, or a Ray job of it; None: something else."""
    for position, word in enumerate(words):
        match = _PROGRAM.fullmatch(plain(word))
        if match is None:
            continue
        before = words[:position]
        if position and not any(word == "--" or _RUNNER.fullmatch(plain(word)) for word in before):
            return None
        prefix = "--runtime-env-json="
        env = next((word.removeprefix(prefix) for word in before if word.startswith(prefix)), None)
        if env is None and "--runtime-env-json" in before[:-1]:
            env = before[list(before).index("--runtime-env-json") + 1]
        return Launch(match[1], tuple(words[position + 1 :]), env)
    return None


def _programs_of(words: Sequence[str]) -> list[str]:
    """Return the Python programs that a command starts and that train, by their names."""
    is_run = any(_RUNNER.fullmatch(plain(word)) for word in words)
    return [name for word in words if is_run and _TRAINING.fullmatch(name := plain(word))]


# ------------------------------------------------------------------------------------------------ the run
class _Record(BaseModel):
    argv: Annotated[list[str], Field(min_length=1)]
    environment: list[str]


class _Answer(BaseModel):
    """What inside/main.py says. It ran next to the script, which is not trusted."""

    records: list[_Record]
    notes: list[str]
    errors: str
    files: dict[str, str]


def _run(file: Path, text: str, values: Mapping[str, str]) -> _Answer:
    """Return the answer of inside/main.py, with the script's real paths.

    Raises:
        SandboxError: this machine has no sandbox, or it gave no answer.
    """
    is_bash = file.suffix != ".py"
    needed = _environment(text)[0] if is_bash else set()
    environment = {name: running("${" + name + "}") for name in {"HOME", "HOSTNAME", *needed}}
    environment |= {name: value for name, value in values.items() if not name.isdecimal()}
    root = _root(file.parent)
    request = {
        "script": str(file),
        "root": str(root),
        "text": text,
        "helpers": {name: (_INSIDE / name).read_text(encoding="utf-8") for name in ("prelude.sh", "launcher.py")},
        "values": dict(values),
        "environment": environment,
        "arguments": _arguments(text, values) if is_bash else [],
        "wall_s": _WALL_S,
    }
    code, stdin = (_INSIDE / "main.py").read_text(encoding="utf-8"), json.dumps(request)

    checkout, is_cut = _checkout(root, file.parent)
    with tempfile.TemporaryFile() as pack:
        pack.write(checkout)
        pack.seek(0)
        result = run_python_sync(
            code, stdin=stdin, limits=_LIMITS, answer_bytes=_MAX_ANSWER, descriptors=[pack.fileno()]
        )
    if result.answer_cut:
        raise SandboxError(f"its commands and the files that it writes are more than {_MAX_ANSWER >> 20} MiB")
    if not result.answer:
        raise SandboxError(f"it gave no answer ({result.killed_by or result.exit_code}): {result.stderr[-1000:]}")
    try:
        answer = _Answer.model_validate(_stopped(_Answer.model_validate_json(result.answer).model_dump()))
    except ValidationError as error:
        raise SandboxError(f"its answer cannot be read: {error.errors()[0]['msg']}") from error
    if is_cut:
        answer.notes.insert(0, f"{root} is large: the script saw a part of its files, those of its own folder first")
    return answer


def _stopped(value: Any) -> Any:
    """Return an answer with all its texts as they are when the script has run."""
    if isinstance(value, dict):
        return {stopped(key): _stopped(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_stopped, value))
    return stopped(value) if isinstance(value, str) else value


def _environment(text: str) -> tuple[set[str], set[str]]:
    """Return the variables that a script needs from its environment, and those that it asks for and can do without."""
    assigned = {name for groups in _SET.findall(text) for name in " ".join(groups).split()}
    tested = dict(_TESTED.findall(text))
    required = {name for name, exits in tested.items() if exits}
    names = {name for name in set(_USED.findall(text)) - assigned if not _OF_BASH.fullmatch(name)}
    needed = names - ((tested.keys() | set(_DEFAULTED.findall(text))) - required)
    return needed, (names & tested.keys()) - needed


def _arguments(text: str, values: Mapping[str, str]) -> list[str]:
    """Return the script's arguments: those of `values`, and markers for others that it reads without a default."""
    numbers = [int(name) for name in values if name.isdecimal()]
    outside = re.sub(r"(?ms)^(?:function\s+)?\w+\s*\(\)\s*\{(?:[^\n]*\}\s*$|.*?^\})", "", text)
    if not numbers and "shift" not in outside:
        numbers = [int(number) for number in re.findall(r"\$\{?([1-9])\b(?![:-])", outside)]
        if not numbers and re.search(r"\$\{?[@*]", outside) and "$#" not in text:
            return [running("$@")]
    return [values.get(str(place), running(f"${place}")) for place in range(1, max([0, *numbers]) + 1)]


def _root(folder: Path) -> Path:
    """Return the checkout around a folder; the folder itself where there is none."""
    names = (".git", "train.py", "scripts/models")
    return next((parent for parent in (folder, *folder.parents) if any((parent / n).exists() for n in names)), folder)


def _checkout(root: Path, folder: Path) -> tuple[bytes, bool]:
    """Return a tar of the small texts below `root`, those of the script's folder first; whether a limit cut it."""
    pack, seen, num_copied, is_cut = io.BytesIO(), set[str](), 0, False
    inside = os.path.realpath(root).rstrip("/") + "/"
    with tarfile.open(fileobj=pack, mode="w") as tar:
        for path in _below(folder, root / "scripts", root):
            is_cut = len(seen) >= _MAX_SEEN or num_copied >= _MAX_COPIED or pack.tell() > _MAX_CHECKOUT
            if is_cut:
                break
            is_new = path not in seen
            seen.add(path)
            if not (is_new and path.endswith(_TEXTS) and os.path.realpath(path).startswith(inside)):
                continue
            with contextlib.suppress(OSError):  # it may not be read, or is gone
                state = os.stat(path)
                if stat.S_ISREG(state.st_mode) and state.st_size <= _MAX_FILE:
                    content = Path(path).read_bytes()
                    info = tarfile.TarInfo(path.lstrip("/"))
                    info.size, info.mode = len(content), state.st_mode & 0o777 | 0o600
                    tar.addfile(info, io.BytesIO(content))
                    num_copied += 1
    return pack.getvalue(), is_cut


def _below(*folders: Path) -> Iterator[str]:
    """Yield the paths of all files below folders, but for hidden folders."""
    for start in folders:
        for folder, below, names in os.walk(start):
            below[:] = sorted(name for name in below if not name.startswith((".", "node_modules")))
            yield from (os.path.join(folder, name) for name in sorted(names))


# ------------------------------------------------------------------------------------------------ files of flags
def _files_as_flags(script: Script, folder: str) -> None:
    """Replace files of flags (--sglang-config, …), written by the script or in its folder, by the flags."""
    done: list[str] = []

    def text_of(path: str) -> str | None:
        if path in script.files:
            return script.files[path]
        file = _find(path, folder)
        return None if file is None else file.read_text(encoding="utf-8", errors="replace")

    for number, launch in enumerate(script.launches):
        argv, read = with_flags(launch.argv, text_of, script.note)
        script.launches[number] = replace(launch, argv=tuple(argv))
        done += read
    for path in done:
        script.files.pop(path, None)


def _find(path: str, folder: str) -> Path | None:
    """Return the file here for a path on the author's machine: that file, or its longest end at or above `folder`.

    A file's name alone is not enough.
    """
    known = path.rpartition(CLOSE)[2].lstrip("/")  # what follows a folder that is not known
    parts = [part for part in os.path.normpath(known).split(os.sep) if part not in ("", "..", ".")]
    ends = [Path(*parts[start:]) for start in range(max(1, len(parts) - 1))]
    places = [Path(folder, path), *(above / end for end in ends for above in (Path(folder), *Path(folder).parents))]
    return next((place for place in places if os.path.isfile(place) and os.access(place, os.R_OK)), None)
