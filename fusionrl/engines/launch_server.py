"""Start SGLang's own HTTP server: `python -m fusionrl.engines.launch_server <SGLang's arguments>`.

Unlike with `python -m sglang.launch_server` the API key comes by standard input, as every user of the machine can read
a command line, and each event of a stream reports which weights sampled which token (`server_patches`). With
`FUSIONRL_DEVICE=cpu` importing this module installs the stand-ins of the cpu wing, so that spawned children, which
import their parent's main module, have them too, and SGLang's children are forked instead.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from fusionrl.base import cpu_wing
from fusionrl.base.imports import without_collections
from fusionrl.base.process import answer_with_stacks, keep_freed
from fusionrl.engines import ADAPTERS_VARIABLE, BITWISE_VARIABLE, DEVICE_VARIABLE, kimi_vl
from fusionrl.engines.server_patches import add_seeds, check_models, install_rendezvous, stamp_streams

_OF_SCHEDULERS = (
    "sglang.srt.managers.tp_worker",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.dllm.algorithm.base",  # of diffusion models: the most by far, as it asks for torch's compiler
    "sglang.srt.mem_cache.kv_cache_configurator",
    "sglang.srt.mem_cache.rust_tree_core.adapter",
    "sglang.srt.constrained.xgrammar_backend",
    "fusionrl.cpu.attention_backend",
)
"""Modules that SGLang imports in functions, as a scheduler starts: 800 files with theirs, 1 s of a core."""
# A forward pass frees and takes again what is smaller. The cache is larger: what is given away goes to the system.
_KEPT_BYTES = 32 * 2**20


def _is_on_cpu() -> bool:
    return os.environ.get(DEVICE_VARIABLE) == "cpu"


if _is_on_cpu():
    cpu_wing.install_stand_ins()
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # SGLang takes its CPU code paths only when told to


def _leave_megatron_out() -> None:
    """Let SGLang find no Megatron-core: its tensor dumper imports one, 1 s of a core in each forked scheduler."""
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]  # the import system's sign for "not there"


def _fork_children() -> None:
    """Let SGLang's scheduler and detokenizer be forks of this process, which has imported all that they need.

    SGLang asks for "spawn", as CUDA does not survive a fork; each child would pay 5 s of a core and 350 MB.
    """
    import multiprocessing

    import torch

    # A fork's threads make torch's pool of threads anew: two at once, as in a load of weights, and one finds none.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    set_start_method = multiprocessing.set_start_method

    def fork_instead(method: str | None, force: bool = False) -> None:
        set_start_method("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = fork_instead


def import_server() -> None:
    """Import all that a server needs: seconds of a core. Idempotent."""
    with _light():
        install_rendezvous()
        _leave_megatron_out()
        import sglang.launch_server
        import sglang.srt.entrypoints.http_server  # noqa: F401  # `run_server` imports it


def import_model() -> None:
    """Import what a scheduler imports as it starts, and the files of the one model that the environment leaves."""
    with _light():
        if _is_on_cpu():
            from fusionrl.cpu import delta_rule

            delta_rule.register()  # models take the functions as they are imported
        import sglang.srt.models.registry  # noqa: F401

        for name in _OF_SCHEDULERS:
            with suppress(ImportError):  # another version of SGLang has it elsewhere, or does without it
                importlib.import_module(name)
        if processor := os.environ.get(cpu_wing.PROCESSOR_VARIABLE):
            importlib.import_module(f"sglang.srt.multimodal.processors.{processor}")
        import fusionrl.models.shape  # noqa: F401  # of `check_models`


@contextmanager
def endpoints_later() -> Iterator[None]:
    """Import SGLang's server within it without the parts that a run never uses: 0.6 s of a core.

    The first message builds the validators of 150 pydantic classes of other protocols (OpenAI's, Anthropic's,
    Ollama's). The endpoint for speech imports the models of speech and images for the text of one prompt.
    """
    from pydantic import BaseModel

    from fusionrl.base.imports import imported_later

    config = BaseModel.model_config
    BaseModel.model_config = config | {"defer_build": True}
    try:
        with imported_later("sglang.srt.multimodal.processors.qwen3_asr", constants=("DEFAULT_ASR_PROMPT",)):
            yield
    finally:
        BaseModel.model_config = config


@contextmanager
def _light() -> Iterator[None]:
    """Import parts of SGLang within it, without what no run uses."""
    from fusionrl.base.imports import cached_scans

    with without_collections(), cached_scans(), endpoints_later(), ExitStack() as on_cpu:
        if _is_on_cpu():
            from fusionrl.cpu.import_stand_ins import symbols_later, uncompiled

            on_cpu.enter_context(symbols_later())
            on_cpu.enter_context(uncompiled())
        yield


def _patch() -> None:
    """Put into SGLang's server and schedulers what they need on every device."""
    stamp_streams()
    add_seeds()
    check_models()
    kimi_vl.register()
    if names := os.environ.get(ADAPTERS_VARIABLE):
        from fusionrl.engines import adapter_versions

        adapter_versions.register(names.split(","))


def main(argv: list[str]) -> None:
    """Parse SGLang's arguments and serve until a signal ends the process."""
    answer_with_stacks()
    api_key = sys.stdin.read()
    if api_key:
        argv = [*argv, "--api-key", api_key]

    import_server()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    _patch()  # for schedulers that are forked, below; a spawned one does it itself
    if _is_on_cpu():
        from fusionrl.cpu import sglang_patches

        keep_freed(_KEPT_BYTES)
        sglang_patches.register(speculates="--speculative-algorithm" in argv, adapts="--enable-lora" in argv)
        if os.environ.get(BITWISE_VARIABLE) == "1":
            from fusionrl.cpu import bitwise

            bitwise.register_engine()
        _fork_children()
    try:
        run_server(prepare_server_args(argv))
    finally:
        # The schedulers are children of this process and do not end with its main thread.
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__mp_main__":  # a child that SGLang spawns, as it does where there is a GPU
    install_rendezvous()
    answer_with_stacks()
    _patch()
if __name__ == "__main__":
    main(sys.argv[1:])
