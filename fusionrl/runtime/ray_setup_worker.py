"""Start a worker of Ray's with an environment of its own: `python ray_setup_worker.py STARTER... WORKER.py ...`.

A raylet starts this in the place of Ray's program of that name, for whoever asks for a `runtime_env`. Such a worker may
be of another interpreter or container, or import from other folders, so it is never a fork of the run's nursery: the
starter's words (`worker_starter.py`) are left out, and Ray's own program does the rest. The name ends as Ray's does, by
which a raylet knows it: it leaves this program out where no environment is asked for.
"""

from __future__ import annotations

import os
import runpy
import sys


def without_starter(arguments: list[str]) -> list[str]:
    """Return Ray's own arguments."""
    names = [os.path.basename(word) for word in arguments[:3]]
    return arguments[3:] if names == ["-I", "-S", "worker_starter.py"] else arguments


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are no top-level ones
    sys.argv[1:] = without_starter(sys.argv[1:])
    runpy.run_module("ray._private.workers.setup_worker", run_name="__main__")
