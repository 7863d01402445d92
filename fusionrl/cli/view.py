"""`fusionrl view`: a run as one HTML file, or one sample with coloured tokens in the terminal."""

from __future__ import annotations

from fusionrl.observe.view.command import main as run

__all__ = ["run"]
