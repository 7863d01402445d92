"""The trainers' half of an adapter push: the files of PEFT folders, in the engines' precision, to each engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from fusionrl.engines.engine import Files
from fusionrl.models.adapters import AdapterSpec, peft_module, peft_sizes
from fusionrl.models.families import hf_shapes
from fusionrl.models.peft_config import CONFIG, WEIGHTS, peft_config, read_peft
from fusionrl.models.peft_folder import PeftReader
from fusionrl.models.rules import Sizes
from fusionrl.models.shape import ModelShape
from fusionrl.plan.push import EngineTarget
from fusionrl.weights.gather import DTYPES
from fusionrl.weights.remote_calls import SendReport, new_send_report, note_sent, wait_all

# Modules that engines have as one: SGLang takes an adapter of all of them.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


def engine_files(tensors: Iterable[tuple[str, Tensor]], spec: AdapterSpec, shape: ModelShape, dtype: str) -> Files:
    """Return the files of an adapter for engines; `tensors` as of `iter_hf_tensors` with `spec`.

    SGLang multiplies by lora_alpha / r, whatever else the config says.
    """
    named = {name: tensor.detach().to("cpu", DTYPES[dtype]).contiguous() for name, tensor in tensors}
    named |= {name: torch.zeros(sizes, dtype=DTYPES[dtype]) for name, sizes in _missing(spec, shape).items()}
    both = (CONFIG, _config(spec, shape)), (WEIGHTS, save(named))
    return {name: np.frombuffer(data, np.uint8) for name, data in both}


def folder_files(folder: str, spec: AdapterSpec, shape: ModelShape, dtype: str) -> Files:
    """Return the same of a PEFT folder, whose adapter is of `spec`. Raises ValueError as `read_peft`."""
    read = PeftReader(read_peft(folder, shape)).get
    return engine_files(
        ((name, read(name, sizes)) for name, sizes in peft_sizes(shape, spec).items()), spec, shape, dtype
    )


@lru_cache(maxsize=2)
def _config(spec: AdapterSpec, shape: ModelShape) -> bytes:
    plain = spec.model_copy(update={"alpha": spec.scale * spec.rank, "use_rslora": False})
    return json.dumps(peft_config(plain, shape, ""), indent=2).encode()


@lru_cache(maxsize=2)
def _missing(spec: AdapterSpec, shape: ModelShape) -> dict[str, Sizes]:
    """Return the tensors of modules without an adapter that engines have as one with modules that do."""
    adapted, zeros = peft_sizes(shape, spec), dict[str, Sizes]()
    for hf, sizes in hf_shapes(shape).items():
        parent, _, leaf = peft_module(hf).rpartition(".")
        siblings = next((modules for modules in _JOINED if leaf in modules), ())
        a, b = f"{parent}.{leaf}.lora_A.weight", f"{parent}.{leaf}.lora_B.weight"
        if a not in adapted and any(f"{parent}.{sibling}.lora_A.weight" in adapted for sibling in siblings):
            zeros |= {a: (spec.rank, sizes[1]), b: (sizes[0], spec.rank)}
    return zeros


def send_files(
    adapters: Mapping[str, Files], targets: Sequence[EngineTarget], version: int, timeout_s: float
) -> SendReport:
    """Let all engines load the adapters at the same time."""
    import ray

    report, start = new_send_report(), time.time()
    shared = ray.put(adapters) if ray.is_initialized() else adapters  # one copy for all engines of a node
    limit_s = 0.9 * timeout_s  # so that an engine that waits says for which requests
    calls = [
        (f"engine {t.index}: load adapters", t.handle.load_adapters.remote(version, shared, limit_s)) for t in targets
    ]
    wait_all(calls, timeout_s)
    num_bytes = sum(data.nbytes for files in adapters.values() for data in files.values())
    note_sent(report, start, num_bytes=num_bytes, num_calls=len(calls))
    return report
