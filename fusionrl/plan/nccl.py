"""NCCL's settings that the ranks of one group must share: trainers and engines, where weights are broadcast.

An SGLang server that finds `NCCL_CUMEM_ENABLE` and `NCCL_NVLS_ENABLE` unset turns both off; NCCL by itself turns them
on where the machine can. Ranks of one group that differ cannot connect: the push fails, or it hangs. So both sides get
both variables, with the same values. Trainers that push by IPC are in no group with engines, and keep NCCL's defaults.
"""

from collections.abc import Mapping

CUMEM, NVLS = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"


def shared_settings(server_args: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, str]:
    """Return both variables as SGLang would leave them: a flag of the engines wins, then the user's value, then "0".

    server_args  the engines' fields of ServerArgs
    environ      the environment of the command
    """
    symmetric = bool(server_args.get("enable_symm_mem"))
    multicast = symmetric or bool(server_args.get("enable_nccl_nvls"))
    return {CUMEM: "1" if symmetric else environ.get(CUMEM, "0"), NVLS: "1" if multicast else environ.get(NVLS, "0")}
