"""Ray's worker in a fork of the run's nursery, which has imported Ray and what actors are made of.

This module is imported for the first worker: Ray reads the raylet's process id and the job id from the environment when
it is loaded.
"""

import importlib
import os
import runpy
import sys
import types
from pathlib import Path

from ray import _raylet as raylet

import fusionrl.runtime.actor_process
import fusionrl.runtime.worker_actors  # noqa: F401

_raylet: types.ModuleType = raylet  # compiled, without annotations
_RAY_S_LIMIT = "set_omp_num_threads_if_unset"
for name in (
    *("ray._private.node", "ray._private.async_compat", "ray._private.runtime_env.setup_hook", "ray.actor"),
    *("ray._common.usage.usage_lib", "ray._common.pydantic_compat"),
):
    importlib.import_module(name)


def main(arguments: list[str]) -> None:
    _raylet.Config.initialize("")  # it was read from the environment when ray was imported
    _raylet.AuthenticationTokenLoader.instance().reset_cache()
    _limit_threads(os.environ.get("OMP_NUM_THREADS", "1"))
    _follow_ray_s_limit()
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).parent))  # as the interpreter does with a program
    runpy.run_path(arguments[0], run_name="__main__")


def _limit_threads(number: str) -> None:
    """Let torch, which is imported already, have the threads of OMP_NUM_THREADS: a number, or several, one a level."""
    torch, first = sys.modules.get("torch"), number.split(",")[0].strip()
    if torch is not None and first.isdecimal() and int(first):
        torch.set_num_threads(int(first))


def _follow_ray_s_limit() -> None:
    """Ray sets the variable to the CPUs of a task or actor before its code is called, which would import torch."""
    ray_utils = importlib.import_module("ray._private.utils")
    set_limit = getattr(ray_utils, _RAY_S_LIMIT)

    def set_and_follow() -> bool:
        is_set = bool(set_limit())
        if is_set:
            _limit_threads(os.environ["OMP_NUM_THREADS"])
        return is_set

    setattr(ray_utils, _RAY_S_LIMIT, set_and_follow)
