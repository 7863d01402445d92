"""`fusionrl report`: the evidence about a run in one file, to send to the person who looks into a failure.

It has flags, plan, versions, the end of the metrics and of each log, stacks of stalls and the summary of a failure.
Secrets are hidden by their names, by their values in this environment and in the flags, and by their forms. Samples
are left out, and so is what may quote them: of the logs of processes that run a user's functions only log records of
fusionrl and of libraries, frames of tracebacks, and messages of crashes are taken. --with-samples takes all.
"""

import argparse
import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusionrl.base.environment import HIDDEN, hide_secrets, is_secret
from fusionrl.base.wording import counted
from fusionrl.checks.doctor.nodes import installed_versions
from fusionrl.cli import refuse
from fusionrl.config.config import FIELDS
from fusionrl.observe.formats import read_object
from fusionrl.observe.logs import LIBRARIES
from fusionrl.observe.metrics import METRICS_FILE
from fusionrl.observe.rollouts import list_rollouts
from fusionrl.observe.show import find_run

_WHOLE = ("config*.json", "plan*.txt", "hardware.a*.json", "repeatable.json", "engines.json", "failure.a*.json")
_TAIL_BYTES, _SAMPLE_BYTES = 2**18, 2**26  # of one file
_VARIABLES = re.compile(r"^(CUDA|FUSIONRL|GLOO|HF|MKL|NCCL|NVIDIA|NVTE|OMP|PYTORCH|RAY|SGLANG|SLURM|TORCH|TMPDIR)")
_LEAST_SECRET = 6  # characters; a shorter value would be found in other words

# ---- lines that quote no sample
_OF_FUNCTIONS = re.compile(r"^(driver|buffer|(trainer|critic|prm)-\d+(\.a\d+)?|buffer\.a\d+)\.log$|^worker-.*\.out$")
_RECORD = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ \S+(?: \d+)? [A-Z]+ (?P<logger>[\w.]+): ")
_FRAME = re.compile(r'^(Traceback \(most|  File "|(Current thread|Thread) 0x|\s*\^+$)')
_CRASH = re.compile(
    r"^(Fatal Python error|Segmentation fault|terminate called|\*\*\* |\[?[EFW]\d{4}|\[rank\d+\]|Killed)"
)
_RAISED = re.compile(r"^(?P<kind>[\w.]+(?:Error|Exception|Died|Exited|Stalled)): .*")
# One that a user's function raised may quote a sample; those of libraries do not.
_WARNING = re.compile(r"( py\.warnings: (?!\S*/site-packages/(?:torch|megatron|sglang|ray|transformers)/).*?: \w+): .*")
_EXAMPLE = re.compile(r'prompt ".*"; answer ".*" \(|label ".*"; reward ')
_REQUEST = re.compile(r"(GenerateReqInput|Receive: |Finish: )")
_OF_HOOK = re.compile(
    r"((?:--[\w-]+ |a user's code|attributes of the user).*?: [\w.]*(?:Error|Exception|Exit|Interrupt)): .*"
)
# What an error, or a record of a room that handles samples, may quote of a sample: from the first quote to the last of
# its kind, or to the end of the line where it was cut; and what follows two words without quotes.
_QUOTED = re.compile(r"""(?<![^\s(:=,\[{])(['"]).*(\1|$)|(?<=token ids ).*|(?<=JSON: ).*""")
_OF_SAMPLES = ("buffer", "data", "engines", "rewards", "rollout")
_OF_PROCESSES = ("ActorDied: ", "ChildExited: ", "Stalled: ", "OSError: ")  # these quote none


def run(argv: Sequence[str]) -> int:
    """Write the file; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser("fusionrl report", description=__doc__.partition("\n")[0])
    parser.add_argument("run", metavar="RUN", nargs="?", help="run folder; default: the newest one under runs/")
    parser.add_argument("--out", metavar="FILE", help="file to write; default: RUN/report.tar.gz")
    parser.add_argument(
        "--with-samples",
        action="store_true",
        help="also samples of the last step and logs with what your functions print",
    )
    options = parser.parse_args(argv)
    try:
        run_dir = find_run(options.run)
        out = Path(options.out) if options.out else run_dir / "report.tar.gz"
        if not out.absolute().parent.is_dir():
            raise ValueError(f"--out {out}: {out.parent} is not a folder")
        names = write_report(run_dir, out, with_samples=options.with_samples)
    except ValueError as error:
        return refuse([str(error)])
    except OSError as error:
        return refuse([f"the report cannot be written ({error}); --out FILE names a file on another disk"])
    kind = "with samples" if options.with_samples else "without samples, keys and output of your functions"
    print(f"{out}: {counted(len(names), 'file')} of {run_dir}, {kind}; look at it before you send it: tar -tzf {out}")
    return 0


def write_report(run_dir: Path, out: Path, *, with_samples: bool = False) -> list[str]:
    """Pack the evidence about a run into a tar.gz file, and return the names of its members."""
    clean, members, unread = secret_hider(run_dir), dict[str, str](), list[str]()

    def read(path: Path, num_bytes: int) -> str:
        try:
            return _tail(path, num_bytes)
        except OSError as error:
            unread.append(f"{path.name}: {error.strerror}")
            return ""

    members["versions.json"] = json.dumps(installed_versions() | {"platform": platform.platform()}, indent=1)
    members["environment.json"] = json.dumps(environment(os.environ), indent=1)
    for path in _files(run_dir, *_WHOLE, "logs/stall-*.txt"):
        members[str(path.relative_to(run_dir))] = read(path, _SAMPLE_BYTES)
    for path in _files(run_dir, "failure.a*.json") if not with_samples else ():
        facts: Any = read_object(path) or {}
        facts["error"] = _without_quotes(_OF_HOOK.sub(r"\1: …", str(facts.get("error")).partition("\n")[0]))
        members[path.name] = json.dumps(facts, indent=1, ensure_ascii=False)
    for path in _files(run_dir, METRICS_FILE, "logs/*.log", "logs/ray.a*/*.out"):
        text = read(path, _TAIL_BYTES)
        members[str(path.relative_to(run_dir))] = text if with_samples else "\n".join(without_samples(path.name, text))
    files = list_rollouts(run_dir) if with_samples else []
    for file in [file for file in files if file.step == files[-1].step]:
        members[str(file.path.relative_to(run_dir))] = read(file.path, _SAMPLE_BYTES)
    if unread:
        members["unread.txt"] = "\n".join(unread)
    partial = out.with_name(f"{out.name}.partial")
    try:
        with tarfile.open(partial, "w:gz") as archive:
            for name, text in members.items():
                data = clean(text).encode(errors="replace")
                entry = tarfile.TarInfo(f"report/{name}")
                entry.size, entry.mtime = len(data), int(time.time())
                archive.addfile(entry, io.BytesIO(data))
        partial.replace(out)
    finally:
        with suppress(OSError):  # renamed, or the disk is read-only
            partial.unlink()
    return list(members)


def _files(run_dir: Path, *patterns: str) -> list[Path]:
    """Return the files of these names, but for links: what they point to was not written by the run."""
    paths = (path for pattern in patterns for path in run_dir.glob(pattern))
    return sorted({path for path in paths if path.is_file() and not path.is_symlink()})


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run heeds, those with secrets hidden."""
    wanted = {name: value for name, value in sorted(variables.items()) if _VARIABLES.match(name)}
    return {name: HIDDEN if is_secret(name, value) else value for name, value in wanted.items()}


def secret_hider(run_dir: Path) -> Callable[[str], str]:
    """Return what hides secrets in a text: values of this environment and of the run's flags, and their forms."""
    secrets = {value for name, value in os.environ.items() if is_secret(name, value)}
    for path in _files(run_dir, "config*.json"):
        secrets |= set(_secrets_in(read_object(path) or {}))
    found = sorted((value for value in secrets if len(value) >= _LEAST_SECRET), key=len, reverse=True)

    def clean(text: str) -> str:
        for value in found:
            text = text.replace(value, HIDDEN)
        return hide_secrets(text, FIELDS)

    return clean


def _secrets_in(values: Mapping[str, object]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _secrets_in(value)
        elif isinstance(value, str) and name not in FIELDS and is_secret(name.replace("-", "_"), value):
            yield value


def _without_quotes(error: str) -> str:
    return error if error.removeprefix("failed: ").startswith(_OF_PROCESSES) else _QUOTED.sub("…", error)


def without_samples(name: str, text: str) -> Iterator[str]:
    """Yield the lines of a log that quote no sample; see the module. Elsewhere it says how many lines are missing."""
    is_checked, num_missing = bool(_OF_FUNCTIONS.match(name)), 0
    for line in text.splitlines():
        kept = line
        if is_checked:
            record, raised = _RECORD.match(line), _RAISED.match(line)
            if record is not None:
                is_known = (
                    record["logger"].partition(".")[0] in (*LIBRARIES, "fusionrl") or record["logger"] in LIBRARIES
                )
                kept = _EXAMPLE.sub("…", line) if is_known else ""
                kept = _WARNING.sub(r"\1: …", kept)
                if record["logger"].split(".")[:2] in [["fusionrl", room] for room in _OF_SAMPLES]:
                    kept = _QUOTED.sub("…", kept)
            elif raised is not None and not raised["kind"].startswith("fusionrl."):
                kept = f"{raised['kind']}: …"
            elif not (raised or _FRAME.match(line) or _CRASH.match(line)):
                kept = ""
            elif raised is not None:
                kept = _QUOTED.sub("…", line)
            kept = _OF_HOOK.sub(r"\1: …", kept)
        elif _REQUEST.search(line):
            kept = ""
        if not kept and line:
            num_missing += 1
            continue
        if num_missing:
            yield f"[{counted(num_missing, 'line')} left out: fusionrl report --with-samples]"
            num_missing = 0
        yield kept
    if num_missing:
        yield f"[{counted(num_missing, 'line')} left out: fusionrl report --with-samples]"


def _tail(path: Path, num_bytes: int) -> str:
    """Return the last whole lines of a file, of at most `num_bytes` bytes."""
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - num_bytes)
        file.seek(start)
        data = file.read(num_bytes)
    text = data.decode(errors="replace")
    return text.partition("\n")[2] if start else text
