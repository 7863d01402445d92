"""Find the commands of a script that start a slime run, and scripts inside a command's words. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fusionrl.compat.slime.scripts.shell import plain

_PROGRAM = re.compile(r"(?:.*/)?(train|train_async)\.py")
_MENTION = re.compile(r"(?:^|[\s/\"'])train(?:_async)?\.py(?:$|[\s\"'])")
_RUNNER = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|srun|mpirun|uv|pdm|poetry|ray|exec)")
# Their words name a program without starting it.
_NAMING = ("echo", "printf", "pkill", "pgrep", "kill", "killall", "grep", "cat", "ls", "ps", "cp", "mv", "rm", "sed")
_TRAINING = re.compile(r"(?:.*/)?\w*(?:train|sft|finetune)\w*\.py")


@dataclass(frozen=True)
class Launch:
    """A command that starts a run.

    program  `train` or `train_async`
    argv     its arguments; parts that cannot be known are marked (see `shell`)
    env      the variables that a Ray job's --runtime-env-json sets, as text
    """

    program: str
    argv: tuple[str, ...]
    env: str | None = None


def launch_of(words: Sequence[str]) -> Launch | None:
    """Return the launch that a command is: `python train.py …`, or a Ray job of it; None: something else."""
    if not words or words[0] in _NAMING:
        return None
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


def scripts_within(words: Sequence[str]) -> list[str]:
    """Return the texts that a command has run by a shell: of `bash -c "…"`, `ssh host "…"`, `eval …`."""
    if not words or words[0] in _NAMING:
        return []
    if words[0] == "eval":
        texts = [" ".join(words[1:])]
    else:
        texts = [word for word in words[1:] if re.search(r"\s", word)]
    return [plain(text) for text in texts if _MENTION.search(plain(text))]


def programs_of(words: Sequence[str]) -> list[str]:
    """Return the Python programs that a command starts and that train, by their names."""
    if not words or words[0] in _NAMING:
        return []
    is_run = any(_RUNNER.fullmatch(plain(word)) for word in words)
    return [name for word in words if is_run and _TRAINING.fullmatch(name := plain(word))]
