"""`fusionrl timeline`: what every process of a run did, and when, as one file for Perfetto, with a report."""

from __future__ import annotations

from fusionrl.observe.timeline.command import main as run

__all__ = ["run"]
