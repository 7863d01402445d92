"""Room `sandbox`: untrusted Python in a process of its own, with bounds on what it may use and reach.

`run_python` for an event loop, `run_python_sync` for a grader. Nothing of the caller is inherited: no environment,
descriptor, working folder or process group, and when a run returns, every process that it started is gone.

docs/guides/sandbox.md says what each mode guarantees and what it does not. Imports only the standard library.
"""

from fusionrl.sandbox.limits import Limits, SandboxError, SandboxResult
from fusionrl.sandbox.run import allow_weak, probe, run_python, run_python_sync

__all__ = [
    "Limits",
    "SandboxError",
    "SandboxResult",
    "allow_weak",
    "probe",
    "run_python",
    "run_python_sync",
]
