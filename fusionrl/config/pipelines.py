"""The pipelines (--pipeline): how generation and training overlap. The driver has a loop for each available one."""

from __future__ import annotations

PIPELINES: dict[str, bool] = {  # name -> whether it is available
    "on-policy": True,
    "stream": False,
    "async": False,
    "async-partial": False,
}
AVAILABLE = tuple(name for name, is_available in PIPELINES.items() if is_available)
