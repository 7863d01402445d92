"""Find the commands that start a slime run among those of a launch script. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fusionrl.compat.slime.scripts.markers import plain

_PROGRAM = re.compile(r"(?:.*/)?(train|train_async)\.py")
_RUNNER = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|srun|mpirun|uv|pdm|poetry|ray)")
_TRAINING = re.compile(r"(?:.*/)?\w*(?:train|sft|finetune)\w*\.py")


@dataclass(frozen=True)
class Launch:
    """A command that starts a run.

    program  `train` or `train_async`
    argv     its arguments; parts that cannot be known are marked (see `markers`)
    env      the variables that a Ray job's --runtime-env-json sets, as text
    """

    program: str
    argv: tuple[str, ...]
    env: str | None = None


def launch_of(words: Sequence[str]) -> Launch | None:
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


def programs_of(words: Sequence[str]) -> list[str]:
    """Return the Python programs that a command starts and that train, by their names."""
    is_run = any(_RUNNER.fullmatch(plain(word)) for word in words)
    return [name for word in words if is_run and _TRAINING.fullmatch(name := plain(word))]
