"""Run a launch script in the sandbox, and answer with the commands that it starts. Standard library only.

The request is JSON on standard input, the checkout a tar on descriptor 4, the answer JSON on descriptor 3. The checkout
is unpacked below a folder, the box, that is the root of the author's machine: paths in the scripts get it in
front, and the caller takes it away again.
"""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping

# Programs that may be installed here, and must not act; others are recorded as commands that are not found.
_NAMES = (
    *("python", "python3", "torchrun", "ray", "accelerate", "deepspeed", "uv", "conda", "pip", "pip3", "sh", "sudo"),
    *("srun", "sbatch", "scontrol", "mpirun", "docker", "podman", "ssh", "scp", "rsync", "tmux", "screen", "curl"),
    *("wget", "git", "hf", "huggingface-cli", "wandb", "kill", "pkill", "pgrep", "killall", "ps", "nvidia-smi"),
    *("rocm-smi", "date", "hostname", "whoami", "ip", "apt", "apt-get", "systemctl", "sleep"),
)
_BACKGROUND_S = 3.0  # for what the script left in the background
_PROGRAM = re.compile(r"[\w./~${}-]*/bin/(python[\d.]*|torchrun|ray|accelerate|uv|p?kill|killall)\b")
_SYSTEM = r"/(?!(?:usr|bin|sbin|lib|lib64|dev|proc|sys|etc|nix|gnu)\b)(?=[A-Za-z_])"
_PATH_IN_BASH = re.compile(r"""(?<![\w./~})\]$*])(?<![\w})\]]["'])""" + _SYSTEM)
_IN_BRACKETS = r"\(((?:[^()]|\([^()]*\))*)\)"
_WORD = r"""(?:"[^"`(\n]*"|[^\s"'`(]+)"""
_REPLACED = [
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in {
        # no command ends the script
        r"\bset(?:\s+[-+][A-Za-z]+(?:\s+(?:pipefail|errexit|nounset|xtrace))?)+": ":",
        # the function `source` of the prelude
        r"(^|[;&|]|\bthen|\bdo)(\s*)\.\s+(?=\S)": r"\1\2source ",
        # the trace has the word of a `case` as the script has it: `:` shows its value
        r"((?:^|;|(?<!\()\)|\bthen|\bdo|\belse)[ \t]*)(case[ \t]+" + _WORD + r"[ \t]+in)\b": r"\1: \2; \2",
        # there is no /dev/fd
        r"[&\d]?>>?\s*>" + _IN_BRACKETS: "",
        r"<\s+<" + _IN_BRACKETS: r'<<< "$(\1)"',
        r">\s*/dev/stderr\b": ">&2",
    }.items()
]
# `$(pip list | grep …)`: the part as a whole is left as it is (see ../arguments.py).
_PIPE = re.compile(
    r"\$\((?:pip3?|date|hostname|ip|git|scontrol|curl|wget|docker|conda|kubectl|squeue)\b[^()]*\|[^()]*\)"
)
# bash cannot compare a value that is not known: in `[[ $N -eq 0 ]]` and `(( N == 0 ))` the name of an unset variable
# replaces it, which bash counts as 0 and writes to the trace.
_NUMBERS_COMPARED = re.compile(
    r"\[\[ (?:(?!\]\])[^\n])* -(?:eq|ne|lt|le|gt|ge) [^\n]*?\]\]"
    r"|(?<![\w$(\\])(?<!for )\(\((?!\()(?:(?!\$\()[^\n;`])*?[<>=](?:(?!\$\()[^\n;`])*?\)\)"
)
_CHANGES_NUMBER = re.compile(r"(?<![<>=!])=(?!=)|\+\+|--")
_NUMBER = re.compile(r"\$(\w+)|\$\{(\w+)\}|(?<![\w$.#{])([A-Za-z_]\w*)(?![\w\[(])")
_RUNNING = {code: code + 0xE100 for code in range(128) if not chr(code).isalnum() and chr(code) != "_"}
_PATH_IN_PYTHON = re.compile(r"(?<![\w./~})\]$*])" + _SYSTEM)


def main() -> None:
    """Unpack, run, answer."""
    request = json.load(sys.stdin)
    home = os.getcwd()
    # The box's name is taken out of the answer: no script has it.
    box, log, programs = (os.path.join(home, name) for name in (f"box-{os.urandom(8).hex()}", "log", "bin"))
    for folder in (box, log, programs, box + "/tmp"):
        os.makedirs(folder)
    with os.fdopen(4, "rb") as pack, tarfile.open(fileobj=pack) as tar:
        tar.extractall(box)
    script = box + request["script"]
    os.makedirs(os.path.dirname(script), exist_ok=True)
    for path, text in {**request["helpers"], script: request["text"]}.items():
        with open(os.path.join(home, path), "w", encoding="utf-8") as file:
            file.write(text)
    bash = shutil.which("bash") or "/bin/bash"
    with open(os.path.join(programs, _NAMES[0]), "w", encoding="utf-8") as file:
        file.write(f'#!{bash}\n_stand_in "${{0##*/}}" "$@"\n')
    os.chmod(file.name, 0o755)
    for name in _NAMES[1:]:
        os.symlink(_NAMES[0], os.path.join(programs, name))

    for path in _paths(box):
        if path == script or path.endswith(".sh"):
            _change(path, box)
    before = {path: os.stat(path).st_mtime_ns for path in _paths(box)}
    environment = {
        **os.environ,
        **{"PATH": f"{programs}:{os.environ['PATH']}", "BASH_ENV": f"{home}/prelude.sh", "TMPDIR": f"{box}/tmp"},
        **{"BOX": box, "BOX_HOME": home, "BOX_LOG": log, "BOX_ROOT": box + request["root"]},
        **{"BOX_FOLDER": os.path.dirname(script), "BOX_SCRIPT": script, "BOX_PYTHON": sys.executable},
        **{"BOX_VALUES": json.dumps(request["values"]), "BOX_MAX_RECORDS": "200"},
        **request["environment"],
    }
    program = [sys.executable, "-S", "-E", f"{home}/launcher.py"] if script.endswith(".py") else [bash]
    errors, notes = _run([*program, script, *request["arguments"]], environment, request["wall_s"])
    trace = _read(os.path.join(log, "trace"))
    answer = {
        "records": list(_records(log, environment)),
        "notes": [
            *_parts(os.path.join(log, "notes")),
            *_conditions(trace),
            *_never_set(trace, box, environment),
            *notes,
        ],
        "errors": errors,
        "files": {path: _read(path) for path in _paths(box) if before.get(path) != os.stat(path).st_mtime_ns},
    }
    text = json.dumps(answer, ensure_ascii=False).replace(box, "")
    with os.fdopen(3, "wb") as pipe:
        pipe.write(text.encode("utf-8", "replace"))


def _change(path: str, box: str) -> None:
    """Put the box in front of the paths in a script; bash reads no `set -e` and no `. file`."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        text = file.read()
    text = _PROGRAM.sub(r"\1", text)
    if path.endswith(".py"):
        text = _PATH_IN_PYTHON.sub(box + "/", text)
    else:
        text = _PIPE.sub(lambda match: f"\ue000{match[0].translate(_RUNNING)}\ue001", text)
        text = _PATH_IN_BASH.sub(box + "/", text)
        text = _NUMBERS_COMPARED.sub(_with_numbers, text)
        for pattern, replacement in _REPLACED:
            text = pattern.sub(replacement, text)
    with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write(text)


def _with_numbers(match: re.Match[str]) -> str:
    """Return a comparison of numbers in which what is not known counts as 0."""
    is_arithmetic = match[0].startswith("((")
    if is_arithmetic and _CHANGES_NUMBER.search(match[0]):
        return match[0]

    def number(part: re.Match[str]) -> str:
        name = part[1] or part[2] or part[3]
        value = f"${{{name}/*\ue000*/_unknown_{name}}}"
        if is_arithmetic:
            return f"({value}+0)"
        return part[0] if part[3] else value

    return _NUMBER.sub(number, match[0])


def _run(argv: list[str], environment: dict[str, str], wall_s: float) -> tuple[str, list[str]]:
    """Run the script, with all that it starts, for at most `wall_s` seconds; return its errors and notes."""
    running, passed = os.pipe()  # closed when the last of the script's processes has ended
    notes = []
    with open(os.path.join(environment["BOX_LOG"], "errors"), "wb") as errors:
        process = subprocess.Popen(
            argv,
            cwd=environment["BOX_FOLDER"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[passed],
            start_new_session=True,
        )
    os.close(passed)
    try:
        if process.wait(wall_s) < 0:
            name = signal.Signals(-process.returncode).name
            notes.append(f"{name} ended the script: what it starts later is not known")
        select.select([running], [], [], _BACKGROUND_S)
    except subprocess.TimeoutExpired:
        notes.append(f"the script did not end within {wall_s:g} s: what it starts later is not known")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return _read(errors.name), notes


def _records(log: str, known: Mapping[str, str]) -> Iterator[dict[str, object]]:
    """Yield the commands in the order in which they were called, with the variables that the script set for each."""
    for name in sorted(name for name in os.listdir(log) if name.endswith(".argv")):
        argv = _parts(os.path.join(log, name))
        if not argv:
            continue  # killed while it wrote
        variables = dict(line.partition("=")[::2] for line in _parts(os.path.join(log, name[:-4] + "env")))
        changed = [name for name, value in variables.items() if known.get(name) != value]
        yield {"argv": argv, "environment": changed}


def _conditions(trace: str) -> Iterator[str]:
    """Yield a note for each condition of bash that asks for a file that is not here, or for what is not known."""
    pattern = r"^\++(?!\+|prelude)[^:]*:(\d+):('\[' .*|\[\[ .*|\(\( .*|test .*|: case .*)$"
    for line, condition in re.findall(pattern, trace, re.MULTILINE):
        condition = condition.replace("'['", "[").replace("']'", "]").removeprefix(": ")
        for option, path in re.findall(r" -([defrsx]) (\S+)", condition):
            if not os.path.exists(path):
                yield f"line {line}: `-{option} {path}` is false: it is not here"
        condition, num_zeros = re.subn(r"\b_unknown_(\w+)", r"${\1}", condition)
        if num_zeros:
            yield f"line {line}: `{' '.join(condition.split())}` counts what is not known as 0: --set gives it a value"
        elif "\ue000" in condition and not re.search(r" -[nz] ", condition):
            yield f"line {line}: `{condition}` is taken as it stands: --set gives a value to what is not known in it"


def _never_set(trace: str, box: str, known: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each array that the scripts that have run use, and that none of them sets."""
    names = set(re.findall(r"^\++(?!prelude)([^:+]+):\d+:", trace, re.MULTILINE))
    text = "\n".join(_read(path) for path in _paths(box) if os.path.basename(path) in names)
    for name in dict.fromkeys(re.findall(r"\$\{(?!BASH|FUNC|PIPE)(\w+)\[[@*]\]\}", text)):
        if name not in known and not re.search(rf"(?<![\w{{$#]){name}\b", text):
            yield f"${{{name}[@]}}: the script never sets it, so it expands to no arguments"


def _paths(box: str) -> list[str]:
    """Return the paths of all files below the box."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(box) for name in names]
    return [path for path in paths if os.path.isfile(path)]


def _parts(path: str) -> list[str]:
    return _read(path).split("\0")[:-1]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 22)
    except OSError:
        return ""


if __name__ == "__main__":
    main()
