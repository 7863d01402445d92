"""`fusionrl from-slime SCRIPT`: the command that does what a launch script for slime does, in bash or in Python.

The script runs in the sandbox, where the programs that it calls are recorded instead of started. What it takes from
other programs (`$(date)`) or from the environment stays in the printed command as the script has it, and is named.
"""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusionrl.checks.validate import elsewhere_errors
from fusionrl.cli import EXIT_USER, refuse
from fusionrl.cli.resolve import not_named_yet
from fusionrl.compat.slime.arguments import custom_file, left_parts, plain, quoted, set_apart, written_file
from fusionrl.compat.slime.flags import (
    PAGE,
    SECRETS,
    TABLE,
    TRAIN_ASYNC,
    Kind,
    flag_groups,
    name_of,
    slime_defaults,
    smaller,
)
from fusionrl.compat.slime.script import Launch, Script, read_script
from fusionrl.compat.slime.translate import accepted_notes, translate
from fusionrl.config.hooks import SIGNATURES, flag_of
from fusionrl.config.parser import read_args
from fusionrl.config.pipeline import FULLY_ASYNC
from fusionrl.sandbox import allow_weak

SHIM = '''"""Take slime's arguments: `python {name}.py …` is `fusionrl train …` with slime's defaults."""

import sys

from fusionrl.cli.from_slime import run_launch

if __name__ == "__main__":
    raise SystemExit(run_launch(sys.argv[1:], "{name}"))
'''
_WIDTH = 116
_TO_REPLACE = ("--hf-checkpoint", "--ref-load", "--opd-teacher-load", "--critic-load", "--prompt-data", "--run-dir")
_NOT_SMALL = ("--save ", "--load ")  # notes on checkpoints, which a small command has none of
_HOOK_FLAGS = [[flag_of(field)] for field in SIGNATURES]


def run(argv: Sequence[str]) -> int:
    """Print the command; returns the exit code."""
    try:
        options = _parser().parse_args(argv or ["--help"])
    except SystemExit as stop:
        return int(stop.code or 0) if argv else EXIT_USER
    if options.flags:
        print(PAGE, end="")
        return 0
    try:
        if options.shim is None and options.script is None:
            raise ValueError("give a launch script")
        for file in make_shim(options.shim) if options.shim is not None else ():
            print(f"# made {file}")
        if options.script is not None:
            allow_weak(options.allow_weak_sandbox)
            print("\n".join(render(read_script(options.script, dict(options.set)), options.script, options.small)))
    except ValueError as error:
        return refuse([str(error)])
    return 0


_HELP = """Print the command that does what the launch script does, with a comment for each flag that differs. The
script runs in the sandbox, and starts nothing there."""
_HELP_OF = {
    "--set": "a variable of the environment that the script reads, its argument (1=VALUE), or a parameter of a launcher"
    " in Python",
    "--small": "the command of a first try: two steps of a few samples, for a machine without a GPU",
    "--flags": "print the table of slime flags as Markdown, and nothing else",
    "--shim": "make FOLDER with train.py and train_async.py, which take slime's arguments",
    "--allow-weak-sandbox": "where the kernel grants no namespaces, run the script in the weak mode of the sandbox"
    " (docs/guides/sandbox.md)",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fusionrl from-slime", description=_HELP, allow_abbrev=False)
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="launch script, in bash or Python")
    repeated: dict[str, Any] = {"action": "append", "default": [], "type": _pair, "metavar": "NAME=VALUE"}
    more = {"--set": repeated, "--shim": {"metavar": "FOLDER"}}
    for flag, text in _HELP_OF.items():
        parser.add_argument(flag, help=text, **more.get(flag, {"action": "store_true"}))
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not (name.isidentifier() or name.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text}: NAME=VALUE is wanted")
    return name, value


def run_launch(argv: Sequence[str], program: str = "train") -> int:
    """Run `fusionrl train` with slime's arguments for `program`.py and slime's defaults; returns the exit code."""
    from fusionrl.cli.train import run as train

    added = _added(argv)
    if _is_ahead(program, argv) and (ahead := _one_ahead([*translate(argv).argv, *added])[0]):
        added = [*_added(argv, is_ahead=True), *ahead]
    if added:
        print(f"slime's defaults: {' '.join(added)}", file=sys.stderr)
    return train([*argv, *added])


def _added(argv: Sequence[str], is_ahead: bool = False) -> list[str]:
    """Return flags that give a command line slime's defaults. `is_ahead`: it generates one rollout ahead."""
    names = {name_of(word) for word in argv if word.startswith("--")} | ({TRAIN_ASYNC} if is_ahead else set())
    return slime_defaults(translate(argv).argv, names)


def make_shim(folder: str) -> list[Path]:
    """Make train.py and train_async.py in `folder`, which take slime's arguments; returns the files.

    Raises:
        ValueError: another file of that name is there.
    """
    files = []
    for name in ("train", "train_async"):
        file, text = Path(folder) / f"{name}.py", SHIM.format(name=name)
        if file.exists() and file.read_text(encoding="utf-8", errors="replace") != text:
            raise ValueError(f"--shim {folder}: {file} is there already; give another folder")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        files.append(file)
    return files


def render(script: Script, path: str, is_small: bool = False) -> list[str]:
    """Return the commands of a script as lines for a shell, each with comments on what differs."""
    lines = [f"# {path}, for fusionrl", *_comments(script.notes)]
    for file, text in script.files.items():
        lines += written_file(quoted(file), text)
    for number, launch in enumerate(script.launches, 1):
        custom = f"{Path(path).stem}{f'-{number}' if len(script.launches) > 1 else ''}.args.yaml"
        lines += ["", *_command(launch, Path(path).parent, is_small, custom, list(map(plain, script.files)))]
    return lines


def _command(launch: Launch, folder: Path, is_small: bool, custom: str, written: Sequence[str]) -> list[str]:
    """Return the command of one launch of a script in `folder`, with its comments.

    custom   the file for flags that slime does not have
    written  files that the script writes before
    """
    apart = set_apart(launch.argv)
    launch = replace(launch, argv=tuple(apart.argv))
    translated = translate(launch.argv)
    lines = []
    for place, word in enumerate(translated.argv):
        if file := _beside(word, folder) if translated.argv[place - 1 : place] in _HOOK_FLAGS else None:
            translated.argv[place] = file
            lines += _comment(f"{word} is next to the script: the command names its file")
    if is_small:
        translated.argv[:] = smaller(translated.argv)
        translated.notes[:] = [note for note in translated.notes if not note.startswith(_NOT_SMALL)]
        lines += _comment(
            "small: flags that need a GPU, evaluation, checkpoints and --resume are left out; two steps of 4 samples."
            f" Give {', '.join(flag for flag in _TO_REPLACE if flag in translated.argv)} a small model of the same"
            " family (tools/make_small_model.py), a few rows of the data, and a new folder"
        )
    ahead: list[str] = []
    if _is_ahead(launch.program, translated.argv):
        ahead, reasons = _one_ahead(translated.argv)
        translated.argv += ahead
        if reasons:
            lines += _comment(
                "train_async.py generates one rollout ahead (--pipeline one-step-off); this one generates and trains in"
                f" turn: {'; '.join(reasons)}"
            )
    added = _added(launch.argv, is_ahead=bool(ahead))
    lines += _comments(translated.notes)
    lines += _comments(f"NOT HERE {error}" for error in [*apart.errors, *translated.errors])
    lines += _comments(f"TO CHANGE {error}" for error in _to_change([*translated.argv, *added], written))
    if compared := [name for name in translated.accepted if TABLE[name].kind is Kind.SHAPE]:
        lines += _comment(
            f"{len(compared)} flags of the model's shape are left out: config.json of --hf-checkpoint says the same"
            " (`fusionrl train` compares them where they are given)"
        )
    lines += _comments(accepted_notes(translated.accepted))
    flags = dict.fromkeys(name_of(word) for word in launch.argv if word.startswith("--"))
    lines += _comments(f"{flag_of(name)}: left out, with its value" for name in flags if name in SECRETS)
    if apart.custom:
        names = [flag_of(name) + (f" ({apart.hints[name]}?)" if name in apart.hints else "") for name in apart.custom]
        lines += _comment(
            f"{', '.join(names)}: neither slime nor fusionrl has these flags. They are in {custom}, read by"
            " --custom-config-path: your functions find them in args. Anything else that a fork does with them is lost"
        )
    words = [*translated.argv, *apart.loose, *map(str, apart.custom.values())]
    unknown = dict.fromkeys(part for word in words for part in left_parts(word))
    lines += _comments(
        f"{part} is left as the script has it: it is known only where the script runs" for part in unknown
    )
    lines += _environment(launch.env)
    if added:
        lines += _comment(f"slime's defaults, which are others here: {' '.join(added)}")
    lines += [f"export {name}={quoted(value)}" for name, value in apart.env.items()]
    if apart.custom:
        lines += custom_file(apart.custom, quoted(custom), _give_custom(translated.argv, custom))
    groups = (" ".join(map(quoted, group)) for group in flag_groups([*translated.argv, *added]))
    loose = [quoted(word) if "@" in word else plain(word) for word in apart.loose]
    return [*lines, " \\\n    ".join(["fusionrl train", *groups, *loose])]


def _give_custom(argv: list[str], path: str) -> str | None:
    """Make `path` the file of --custom-config-path; return the one that it was."""
    flag = flag_of("custom_config_path")
    if flag in argv[:-1]:
        place = argv.index(flag) + 1
        former, argv[place] = quoted(argv[place]), path
        return former
    argv += [flag, path]
    return None


def _beside(path: str, folder: Path) -> str | None:
    """Return a function's path by its file where `module.function` names a file in `folder`; None: it does not.

    slime's scripts put their folder on PYTHONPATH; `fusionrl` searches no folder for modules.
    """
    module, _, name = path.rpartition(".")
    file = folder / f"{module.replace('.', '/')}.py"
    return f"{file}:{name}" if module and ":" not in path and os.path.isfile(file) else None


def _to_change(argv: Sequence[str], written: Sequence[str] = ()) -> list[str]:
    """Return what keeps the command from running as it stands, as far as its flags alone show it.

    A flag whose value only the machine of the run knows is not looked at, nor one that names a file of `written`.
    """
    known = [plain(word) for word in argv]
    config, errors = read_args(known)
    unknown = [*written, *(part for word in argv for part in left_parts(word))]
    bad = [error for error in errors if not any(part in error for part in unknown)]
    return [*bad, *not_named_yet(elsewhere_errors(config, None), errors)]


def _is_ahead(program: str, argv: Sequence[str]) -> bool:
    """Return whether the launch itself generates ahead; slime's fully asynchronous worker does that without it."""
    return program == "train_async" and not {"sft", "sft_loss", *FULLY_ASYNC} & set(argv)


def _one_ahead(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags by which a run generates one rollout ahead; none, and the reasons, where it cannot."""
    flags = ["--pipeline", "one-step-off"]
    before = _to_change(argv)
    reasons = [error for error in _to_change([*argv, *flags]) if error not in before]
    return ([], reasons) if reasons else (flags, [])


def _environment(env: str | None) -> list[str]:
    """Return comments on the variables that the Ray job sets."""
    if env is None:
        return []
    try:
        variables = json.loads(plain(env)).get("env_vars", {})
    except (ValueError, AttributeError):
        return _comment("the job's environment (--runtime-env-json) is not known; export what your functions need")
    of_cluster = ("PYTHONPATH", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE")
    names = [name for name in variables if name not in of_cluster] if isinstance(variables, Mapping) else []
    cure = "export what your functions need before the command (secrets: --hook-env)"
    return _comment(f"the job sets {', '.join(names)}: {cure}") if names else []


def _comment(text: str) -> list[str]:
    wrapper = textwrap.TextWrapper(_WIDTH, "# ", "#   ", break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(" ".join(plain(text).split()))


def _comments(texts: Iterable[str]) -> list[str]:
    return [line for text in texts for line in _comment(text)]
