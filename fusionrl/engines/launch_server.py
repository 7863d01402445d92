"""Start SGLang's own HTTP server: `python -m fusionrl.engines.launch_server <SGLang's arguments>`.

It adds four things to `python -m sglang.launch_server`. With `FUSIONRL_DEVICE=cpu` the import stand-ins of
`cpu_sglang` are installed when this module is imported, so that a spawned child of SGLang's, which imports its
parent's main module again, has them too; and SGLang's own children are forked instead, as below. The API key
comes by standard input, as every user of the machine can read a command line, and every process of the same user the
environment. And nothing of SGLang is imported before that, so a spawned child that is not SGLang's pays nothing.
"""

from __future__ import annotations

import os
import sys

from fusionrl.base.imports import without_collections
from fusionrl.engines import rendezvous

DEVICE_VARIABLE = "FUSIONRL_DEVICE"

if os.environ.get(DEVICE_VARIABLE) == "cpu":
    from fusionrl.upstream import cpu_sglang

    cpu_sglang.install()
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # SGLang takes its CPU code paths only when told to


def _leave_megatron_out() -> None:
    """Let SGLang find no Megatron-core.

    A tool of SGLang's that writes tensors to files imports it where it is installed: 1 s of a core in each
    scheduler that is a fork of this process, as on a CPU.
    """
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]  # the import system's sign for "not there"


def _fork_children() -> None:
    """Let SGLang's scheduler and detokenizer be forks of this process, which has imported all that they need.

    SGLang asks for "spawn", as CUDA does not survive a fork. Where there is none, each spawned child pays the imports
    again: 5 s of a core and 350 MB.
    """
    import multiprocessing

    set_start_method = multiprocessing.set_start_method

    def fork_instead(method: str | None, force: bool = False) -> None:
        set_start_method("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = fork_instead


def main(argv: list[str]) -> None:
    """Parse SGLang's arguments and serve until a signal ends the process."""
    api_key = sys.stdin.read()
    if api_key:
        argv = [*argv, "--api-key", api_key]

    with without_collections():
        rendezvous.install()
        _leave_megatron_out()
        import sglang.srt.entrypoints.http_server  # noqa: F401  # `run_server` imports it
        from sglang.launch_server import run_server
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

    if os.environ.get(DEVICE_VARIABLE) == "cpu":
        _fork_children()
    try:
        run_server(prepare_server_args(argv))
    finally:
        # The schedulers are children of this process and do not end with its main thread.
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__mp_main__":  # a child that SGLang spawns, as it does where there is a GPU
    rendezvous.install()
if __name__ == "__main__":
    main(sys.argv[1:])
