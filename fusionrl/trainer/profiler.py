"""A profile of one trainer's process: by torch's profiler, of the GPU's memory, or for nsys, under which it runs."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MAX_MEMORY_EVENTS = 1_000_000


class Profiled:
    """A process that can be profiled: from `start_profile` to `stop_profile`."""

    _profile: torch.profiler.profile | None = None

    def start_profile(self, tool: str) -> None:
        """Begin; `tool`: torch, memory or nsys."""
        import torch

        if tool == "torch":
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()
        elif tool == "memory":
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
        else:
            torch.cuda.profiler.start()

    def stop_profile(self, tool: str, path: str) -> None:
        """End, and write what was recorded: `path` with .trace.json.gz or .pickle; nsys writes its own file."""
        import torch

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if tool == "torch" and self._profile is not None:
            profile, self._profile = self._profile, None
            profile.stop()
            plain = f"{path}.tmp.json"
            profile.export_chrome_trace(plain)
            _compress(plain, f"{path}.trace.json.gz")
        elif tool == "memory":
            torch.cuda.memory._dump_snapshot(f"{path}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        elif tool == "nsys":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def _compress(plain: str, path: str) -> None:
    with open(plain, "rb") as source, gzip.open(f"{path}.part", "wb", compresslevel=1) as target:
        shutil.copyfileobj(source, target)
    os.replace(f"{path}.part", path)  # under its name it is complete
    os.unlink(plain)
