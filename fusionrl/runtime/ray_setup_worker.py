"""Start a Ray worker with its own environment: `python ray_setup_worker.py STARTER... WORKER.py ...`.

It replaces Ray's `setup_worker.py` for workers with a `runtime_env`, which are never forks of the run's nursery: this
drops the arguments of `ray_programs.py` and runs Ray's own program. A raylet knows it by the end of its name.
"""

import os
import runpy
import sys


def without_starter(arguments: list[str]) -> list[str]:
    names = [os.path.basename(word) for word in arguments[:4]]
    return arguments[4:] if names == ["-I", "-S", "ray_programs.py", "worker"] else arguments


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are not top-level
    sys.argv[1:] = without_starter(sys.argv[1:])
    runpy.run_module("ray._private.workers.setup_worker", run_name="__main__")
