"""The sandbox under the name that hooks know; the code is the room `fusionrl.sandbox`."""

from fusionrl.sandbox import Limits, SandboxError, SandboxResult, run_python, run_python_sync

__all__ = ["Limits", "SandboxError", "SandboxResult", "run_python", "run_python_sync"]
