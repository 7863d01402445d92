"""A real SGLang engine on a CPU, and transformers' numbers to compare its own with."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusionrl.engines.engine import EngineActor, EngineSpec
from fusionrl.engines.images import ImageSettings

KEY = "a key of the test"


def real_engine(
    model: Path | str,
    log_dir: Path,
    role: Any = "engine",
    *,
    index: int = 0,
    tp_size: int = 1,
    images: ImageSettings | None = None,
    **server_args: Any,
) -> EngineActor:
    """An engine that serves `model` in fp32, not yet started."""
    places = {
        "tp_size": tp_size,
        "gpu_ids": (),
        "host": "127.0.0.1",
        "api_key": KEY,
        "log_dir": str(log_dir),
        "seed": 1,
    }
    args = {"max_total_tokens": 8192, **server_args}
    options: dict[str, Any] = {"start_timeout_s": 240.0, "server_args": args, "role": role, "images": images}
    spec = EngineSpec(index, str(model), "cpu", "float32", **places, **options)
    return EngineActor(spec)


def log_probs(model: torch.nn.Module, ids: Any, num_prompt: int, temperature: float = 1.0) -> np.ndarray:
    """Log-probs that a model of transformers gives to all of `ids` but the first `num_prompt`."""
    tokens = torch.from_numpy(np.asarray(ids, np.int64))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, num_prompt - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[num_prompt:, None])[:, 0].numpy()
