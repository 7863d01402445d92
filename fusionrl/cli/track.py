"""`fusionrl track`: metrics of a run in W&B, TensorBoard, MLflow, SwanLab or trackio."""

from __future__ import annotations

from fusionrl.observe.track.command import main as run

__all__ = ["run"]
