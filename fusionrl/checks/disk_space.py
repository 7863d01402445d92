"""Room on the disks that a run writes to, for the doctor, the plan and the start of a run."""

from __future__ import annotations

from pathlib import Path

from fusionrl.checks.doctor.findings import Finding
from fusionrl.checks.doctor.host import disk_findings, temporary_folder
from fusionrl.config.config import Config
from fusionrl.config.run_parts import changes_weights, saves
from fusionrl.plan.plan import Plan

_STATE_BYTES = 14  # of a parameter in a checkpoint: bf16 weights, fp32 weights and two moments
_STATE_BYTES_FP32 = 12


def disk_findings_of_run(config: Config | None, plan: Plan | None) -> list[Finding]:
    """Compare the room for `runs/`, or the run's folders, with the checkpoints and weights that the run keeps there."""
    folder = Path(config.run.run_dir) if config is not None and config.run.run_dir else Path("runs")
    folders, needed = {"--run-dir": folder, "TMPDIR": temporary_folder()}, {}
    if config is not None and config.checkpoint.save_hf:
        folders["--save-hf"] = Path(config.checkpoint.save_hf).parent
    if config is not None and plan is not None:
        weights = float(plan.shape.num_parameters * (4 if plan.precision == "fp32" else 2))
        needed = {"--run-dir": ("checkpoints", checkpoint_bytes(config, plan)), "--save-hf": ("weights", weights)}
    return disk_findings(folders, needed)


def disk_warnings(config: Config, plan: Plan) -> list[str]:
    """Return a text, with its cure, for each disk that has too little room."""
    return [
        f"{finding.fact}; {finding.cure}" for finding in disk_findings_of_run(config, plan) if finding.status != "fact"
    ]


def checkpoint_bytes(config: Config, plan: Plan) -> float:
    """Return the bytes of all checkpoints that the run keeps at once."""
    options = config.checkpoint
    if options.no_save or not saves(config) or not changes_weights(config):
        return 0.0
    num_saved = -(-plan.num_rollout // options.save_interval) if options.save_interval else 1
    if options.keep_checkpoints is not None:
        num_saved = min(num_saved, options.keep_checkpoints + 1)  # the newest is written before the oldest goes
    parameter = _STATE_BYTES_FP32 if plan.precision == "fp32" else _STATE_BYTES
    return float(max(num_saved, 1) * plan.shape.num_parameters * parameter)
