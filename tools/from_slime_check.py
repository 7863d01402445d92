"""Check that the user-level functions of a checkout of slime load here unchanged.

    python tools/from_slime_check.py --slime DIR [--only PART]

Every file of the checkout's examples/ and slime_plugins/ is imported in a process of its own, as fusionrl imports a
hook's file, but for programs. Nothing of it is changed or copied, and slime itself is not installed. One line a file:
`pass`, with the functions that a flag may name, or `fail`, with the reason, or `skip` for a program. Packages of other
projects that are not installed are stood in for by empty ones, and named. The kind of a function is read from its
signature; it is also checked against the call that the flag makes. Exits with 1 if fewer pass than --least.
"""

import argparse
import ast
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import MagicMock

FOLDERS = ("examples", "slime_plugins")
LOAD_TIMEOUT_S = 180.0
# First parameters of a function -> the flag that takes such functions. The first rule that fits counts.
KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("args", "sample", "sampling_params"), "custom_generate_function_path"),
    (("args", "base_sample", "sampling_params"), "custom_generate_function_path"),
    (("input",), "custom_generate_function_path"),
    (("base_url", "prompt"), "custom_agent_function_path"),  # of a fork: no flag here
    (("args", "sample"), "custom_rm_path"),
    (("args", "samples"), "custom_rm_path"),
    (("args", "rollout_id", "data_buffer"), "rollout_function_path"),
    (("args", "rollout_id", "data_source"), "rollout_function_path"),
    (("args", "config", "vp_stage"), "spec"),
)
KEYWORDS = {"custom_tis_function_path": {"pg_loss", "train_log_probs", "rollout_log_probs"}}


@dataclass
class Found:
    """A file and what happened to it."""

    file: str
    verdict: str  # pass, fail, skip
    reason: str
    functions: list[str]


def functions_of(file: Path) -> list[tuple[str, str]]:
    """(flag, name) of the functions of a file that a flag may name, by their parameters."""
    hooks = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        keywords = {arg.arg for arg in node.args.kwonlyargs} | set(names)
        flags = [flag for first, flag in KINDS if tuple(names[: len(first)]) == first]
        flags += [flag for flag, required in KEYWORDS.items() if required <= keywords]
        is_helper = isinstance(node, ast.AsyncFunctionDef) and flags[:1] == ["rollout_function_path"]
        hooks += [(flags[0], node.name)] if flags and not is_helper else []
    return hooks


def is_program(file: Path) -> bool:
    """Return whether the file is run, not imported: it acts at its top level, or only when it is run."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    has_main = "'__main__'" in ast.dump(ast.Module(body=body, type_ignores=[]))
    acts = any(isinstance(node, ast.Expr | ast.For | ast.With) and not _is_text(node) for node in body)
    return not functions_of(file) and (has_main or acts)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class StandIns:
    """Gives empty packages for those that are not installed, so that what they are missing for is seen all the same."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of an empty module of one of these packages."""
        is_ours = name.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make the module: any name of it is there."""
        module = types.ModuleType(spec.name)
        vars(module)["__getattr__"] = lambda name: _missing(spec.name, name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def _missing(module: str, name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    # A class may be derived from what begins with a capital letter.
    members = {"__module__": module, "__init__": lambda self, *args, **kwargs: None}
    return type(name, (), members) if name[0].isupper() else MagicMock(name=f"{module}.{name}")


def load(path: str, hooks: list[tuple[str, str]]) -> None:
    """Import a file as a hook, and check its functions; prints what is wrong as a line of JSON. Runs in a process.

    Packages of other projects that are not installed are stood in for, and named.
    """
    import torch

    from fusionrl.config.hook_files import import_file
    from fusionrl.config.hooks import SIGNATURES, check_hook
    from fusionrl.config.user_code import last_user_line

    if not torch.cuda.is_available():
        from fusionrl.base import cpu_wing

        cpu_wing.install_stand_ins()  # sglang imports triton, which a CPU run does without
    errors = []
    stand_ins = StandIns()
    sys.meta_path.append(stand_ins)
    while True:
        try:
            import_file(Path(path))
        except ModuleNotFoundError as error:
            top = (error.name or "").partition(".")[0]
            if top and top not in stand_ins.names and importlib.util.find_spec(top) is None:
                stand_ins.names.add(top)
                continue
            errors.append(told(error, last_user_line(error, f"{path}:x")))
        except Exception as error:  # a user's file may raise anything
            errors.append(told(error, last_user_line(error, f"{path}:x")))
        break
    if not errors:
        checks = (check_hook(flag, f"{path}:{name}") for flag, name in hooks if flag in SIGNATURES)
        errors += [error for error in checks if error]
    print(json.dumps([errors, sorted(stand_ins.names)]))


def told(error: Exception, line: str | None) -> str:
    """An error, and the user's line that it came from."""
    return f"{type(error).__name__}: {error}{f' at {line}' if line else ''}"


def check(root: Path, file: Path) -> Found:
    """Check one file, in a process of its own."""
    name = str(file.relative_to(root))
    hooks = functions_of(file)
    labels = [f"{function} (--{flag.replace('_', '-')})" for flag, function in hooks]
    if is_program(file):
        return Found(name, "skip", "a program, not a function", labels)
    command = [sys.executable, __file__, "--load", str(file), json.dumps(hooks)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, cwd=file.parent)
    except subprocess.TimeoutExpired:
        return Found(name, "fail", f"not loaded after {LOAD_TIMEOUT_S:.0f} s", labels)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        stderr = done.stderr.strip().splitlines()
        return Found(name, "fail", stderr[-1] if stderr else f"exit code {done.returncode}", labels)
    errors, missing = json.loads(lines[-1])
    needs = [f"with empty stand-ins for what is not installed: {', '.join(missing)}"] if missing else []
    return Found(name, "fail" if errors else "pass", "; ".join(errors + needs), labels)


def files_of(root: Path, only: str) -> list[Path]:
    """The files to check: those of both folders that hold something."""
    files = sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py"))
    return [file for file in files if only in str(file.relative_to(root)) and file.stat().st_size]


def main() -> int:
    """Check a checkout; see the module."""
    if sys.argv[1:2] == ["--load"]:
        load(sys.argv[2], [tuple(pair) for pair in json.loads(sys.argv[3])])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slime", type=Path, required=True, metavar="DIR", help="a checkout of slime, or of miles")
    parser.add_argument("--only", default="", metavar="PART", help="files whose path holds this text")
    parser.add_argument("--least", type=int, default=0, help="files with functions of flags that must pass")
    options = parser.parse_args()
    root = options.slime.resolve()
    if not (root / "examples").is_dir():
        parser.error(f"--slime {root}: it has no folder examples; name the root of a checkout")
    for name in ("slime", "miles"):
        if importlib.util.find_spec(name) is not None:
            parser.error(f"{name} itself is installed, and would be loaded; use an environment without it")
    results = [check(root, file) for file in files_of(root, options.only)]
    for result in results:
        print(f"{result.verdict}  {result.file}{': ' + ', '.join(result.functions) if result.functions else ''}")
        if result.reason and result.verdict != "skip":
            print(f"      {result.reason}")
    hooks = [result for result in results if result.functions]
    passed = sum(result.verdict == "pass" for result in hooks)
    loaded = sum(result.verdict == "pass" for result in results)
    tried = sum(result.verdict != "skip" for result in results)
    print(f"{passed} of {len(hooks)} files with functions of flags pass; {loaded} of {tried} files load")
    return 0 if passed >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
