"""The environment of the run's actors: what the driver decides for all of them. The rest is settled on their node."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fusionrl.base.environment import FOLDER_VARIABLE, PEERS_VARIABLE
from fusionrl.plan.nccl import shared_settings
from fusionrl.plan.plan import Plan


def actor_environment(
    plan: Plan,
    server_args: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    stores: Path | None,
    peers: Sequence[str],
) -> dict[str, str]:
    """Return the variables of every actor, on whatever node: imports from the folder the command ran in, and NCCL's.

    An engine's server inherits those of its actor, so that trainers and engines have the same.

    Args:
        plan: the run's.
        server_args: the engines' fields of SGLang's ServerArgs.
        environ: the environment of the command.
        stores: the folder of the run's stores where it is alone on its node, else None.
        peers: the addresses of the nodes.
    """
    paths = [str(Path(__file__).resolve().parents[2]), os.getcwd(), environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"}
    if stores is not None:
        env[FOLDER_VARIABLE] = str(stores)
    else:
        env[PEERS_VARIABLE] = ",".join(peers)
    if plan.device == "cpu":
        return env | {"CUDA_VISIBLE_DEVICES": ""}  # a GPU that the machine has, but the run does not use
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return env | (shared_settings(server_args, environ) if plan.transport == "broadcast" else {})
