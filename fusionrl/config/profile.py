"""The profile that --profile-… ask for: which steps, which processes, by which tool."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fusionrl.config.config import Config

FOLDER = "profiles"  # in the run's folder
ALL = "all"


@dataclass(frozen=True)
class ProfileOrder:
    """The order for profiles.

    steps          (first, last) of each stretch of steps, as in metrics.jsonl
    trainers       ranks; None: all
    engines        indices; None: all
    is_continuous  one trace for a stretch of steps, in place of one a step
    """

    steps: tuple[tuple[int, int], ...]
    trainers: frozenset[int] | None
    engines: frozenset[int] | None
    tool: str
    is_continuous: bool

    @classmethod
    def of(cls, config: Config) -> ProfileOrder | None:
        """Read the flags; None: the run takes no profile. ValueError: a value is not of its form."""
        run = config.run
        if not run.profile_steps:
            return None
        steps = tuple(_stretch(text) for text in run.profile_steps)
        trainers, engines = set[int](), set[int]()
        for text in run.profile_ranks:
            if text != ALL:
                match = re.fullmatch(r"(engine-)?(\d+)", text)
                if match is None:
                    raise ValueError(f"--profile-ranks {text}: give a trainer's rank (0), an engine (engine-0), or all")
                (engines if match[1] else trainers).add(int(match[2]))
        some_trainers, some_engines = (None if ALL in run.profile_ranks else frozenset(x) for x in (trainers, engines))
        return cls(steps, some_trainers, some_engines, run.profile_tool, run.profile_continuous)

    def has(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.steps)

    def wants_trainer(self, rank: int) -> bool:
        return self.trainers is None or rank in self.trainers

    def wants_engine(self, index: int) -> bool:
        return self.engines is None or index in self.engines


def nsys_options(output: str) -> dict[str, str]:
    """Options of `nsys profile`: nothing is recorded but between start and stop of a profile, which makes a report."""
    return {
        "t": "cuda,nvtx,osrt,cublas,cudnn",
        "o": output,
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat",
        "kill": "none",
        "trace-fork-before-exec": "true",
        "force-overwrite": "true",
    }


def nsys_command(output: str) -> list[str]:
    """Return the beginning of a command line that is to be profiled."""
    options = nsys_options(output).items()
    return ["nsys", "profile", *(f"--{k}={v}" if len(k) > 1 else f"-{k}{v}" for k, v in options)]


def _stretch(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or int(match[1]) < 1 or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"--profile-steps {text}: expected steps from 1 on, e.g. 3 or 5-7")
    return int(match[1]), int(match[2] or match[1])
