"""Buffers that the tests of this room share."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.buffer.actor import BufferActor, EngineEndpoints
from fusionrl.config.config import Config
from fusionrl.config.hooks import load_function
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.plan import make_plan

HOOKS = Path(__file__).with_name("buffer_hooks.py")


@pytest.fixture
def make_buffer(tiny_model: Path, tmp_path: Path) -> Callable[..., BufferActor]:
    """make_buffer(flag=value, …) -> a Buffer that has been set up.

    A flag of None is left out; a name in a flag of a path stands for the function of the file `hooks`.
    """

    def make(attempt: int = 1, run: str = "run", hooks: Path = HOOKS, **flags: Any) -> BufferActor:
        given = {name: value for name, value in flags.items() if value is not None}
        names = {n: v for n, v in given.items() if n.endswith("_path") and isinstance(v, str) and v.isidentifier()}
        given |= {name: f"{hooks}:{function}" for name, function in names.items()}
        config = Config.from_flat({"hf_checkpoint": str(tiny_model)} | given)
        plan = make_plan(config, read_model_shape(tiny_model), device="cpu", num_prompts=40)
        made = BufferActor(config, plan, str(tmp_path / run), attempt, put=lambda shard: shard)
        asyncio.run(made.setup(EngineEndpoints()))
        return made

    return make


@pytest.fixture
def notes() -> dict[str, Any]:
    """Globals of the hooks; what they noted is empty at the start of each test."""
    names: dict[str, Any] = load_function(f"{HOOKS}:parity").__globals__
    names["CALLS"].clear()
    return names


@pytest.fixture
def buffer(make_buffer: Any, write_rows: Any, notes: Any) -> Callable[..., BufferActor]:
    """buffer(flag=value, …) -> a Buffer of 12 prompts; 4 prompts x 2 samples a rollout, 2 ranks."""
    usual = {
        "prompt_data": str(write_rows([{"input": f"p{i}", "label": str(i)} for i in range(12)])),
        "label_key": "label",
        "rollout_function_path": "bare_lists",
        "custom_rm_path": "parity",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 4,
        "num_rollout": 3,
        "actor_num_gpus_per_node": 2,
    }
    return lambda **changes: make_buffer(**usual | changes)
