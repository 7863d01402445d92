"""Order of the modules that a run's nursery imports, and of the processes that it forks."""

import os
from pathlib import Path

from fusionrl.base.nursery import Branch, Order
from fusionrl.base.sockets import LOOPBACK
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import sees_images
from fusionrl.config.run_parts import uses_engines, uses_trainers
from fusionrl.engines.images import CACHE_VARIABLE, KEEP_IDS_VARIABLE, ImageSettings
from fusionrl.engines.process import NURSERY_SOCKET
from fusionrl.engines.spec import EngineSpec, server_environment
from fusionrl.runtime import worker_starter

_OF_ACTORS = ("fusionrl.runtime.ray_imports", "fusionrl.runtime.tokenizer_imports")


def make_order(config: Config, folder: Path, key: str) -> Order:
    """Order what the nursery of a run is to import and to fork. `key`: of those who may ask for a fork."""
    branches = []
    if uses_engines(config) and config.model.hf_checkpoint is not None:
        branches.append(engine_branch(config.model.hf_checkpoint, folder, sees=sees_images(config)))
    megatron = ["fusionrl.cpu.early_imports"] if uses_trainers(config) else []
    client = ["aiohttp"] if uses_engines(config) else []  # of engines; imported by their first request elsewhere
    worker = Branch(
        str(folder / worker_starter.SOCKET),
        ["fusionrl.runtime.engine_worker", "fusionrl.runtime.worker_actors", *megatron, *client, *_OF_ACTORS],
        "fusionrl.runtime.worker_fork:main",  # with it Ray, which keeps its variables
        late=["RAY_JOB_ID", "RAY_RAYLET_PID"],
    )
    return Order(key, [*branches, worker])


def engine_branch(model_path: str, folder: Path, *, sees: bool = False) -> Branch:
    """Of the policy's engines; `sees`: they are asked about images.

    An engine of another model imports other files of SGLang, and is started in the usual way.
    """
    spec = EngineSpec(
        index=0,
        model_path=model_path,
        device="cpu",
        dtype="float32",
        tp_size=1,
        gpu_ids=(),
        host=LOOPBACK,
        api_key=None,
        log_dir="",
        seed=0,
        images=ImageSettings(trains_tower=True) if sees else None,
    )
    environment = {name: value for name, value in server_environment(spec).items() if os.environ.get(name) != value}
    environment.pop("PYTHONPATH", None)
    return Branch(
        str(folder / NURSERY_SOCKET),
        ["fusionrl.engines.server_imports"],
        "fusionrl.engines.process:mind_server",
        environment,
        kept=["SGLANG_", "HF_", "TRANSFORMERS_", "TORCHDYNAMO_", "THP_"],
        # Each rank reads the first when it begins, and servers the others.
        free=["SGLANG_CPU_OMP_THREADS_BIND", CACHE_VARIABLE, KEEP_IDS_VARIABLE],
    )
