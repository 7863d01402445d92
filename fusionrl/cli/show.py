"""`fusionrl show`: samples of a run, with rewards and advantages."""

from __future__ import annotations

from fusionrl.observe.show import main as run

__all__ = ["run"]
