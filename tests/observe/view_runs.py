"""Runs for the tests of `fusionrl view`, written by the writers of real runs."""

import base64
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fusionrl.observe.metrics import MetricsSink
from fusionrl.observe.rollouts import RolloutWriter


def sample(index: int, reward: Any = 0.5, length: int = 4, seed: int | None = None, **fields: Any) -> dict[str, Any]:
    """A row of a rollout's file; groups of two."""
    rng = np.random.default_rng(index if seed is None else seed)
    tokens = rng.integers(0, 16, 3 + length).astype(np.int32)
    row = {"group_index": index // 2, "index": index, "prompt": f"question {index // 2}", "tokens": tokens}
    row |= {"response": f"answer {index}", "response_length": length, "label": str(index), "reward": reward}
    row |= {"loss_mask": np.ones(length, np.int64), "rollout_log_probs": -rng.random(length, np.float32)}
    row |= {"weight_versions": np.full(length, 1), "status": "completed", "remove_sample": False, "metadata": {}}
    return row | fields


def trained(line: int, length: int = 4, **fields: Any) -> dict[str, Any]:
    """A row of the trainers, with --save-token-values."""
    rng = np.random.default_rng(line)
    row = {"line": line, "num_trained": length, "advantage": 0.25, "mismatch": 0.01 * (line + 1)}
    row |= {"log_probs": -rng.random(length, np.float32), "entropy": rng.random(length, np.float32)}
    return row | {"advantages": np.full(length, 0.25, np.float32)} | fields


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer.json of 16 tokens: letters, a blank, a line feed, and ä cut into its two bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = [*"abcdefghij", "Ġ", "Ċ", "Ã", "¤", "the", "<|end|>"]
    content = {
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(entries)}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]},
        "added_tokens": [{"id": 15, "content": "<|end|>", "special": True}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def write_run(
    folder: Path, steps: Sequence[Sequence[dict[str, Any]]], tokenizer: Path | None = None, **series: Sequence[float]
) -> Path:
    """A run with these samples a step, trainers' values of each, and metrics by name (`a__b` for `a/b`)."""
    writer = RolloutWriter(folder)
    config = {"reward": {"reward_key": None}, "model": {"hf_checkpoint": str(tokenizer) if tokenizer else None}}
    (folder / "config.json").write_text(json.dumps(config))
    for number, rows in enumerate(steps):
        path = writer.write(number, 1, rows)
        writer.write_trained(path, [trained(line, row["response_length"]) for line, row in enumerate(rows)])
    count = max((len(values) for values in series.values()), default=len(steps))
    with MetricsSink(folder, 1) as sink:
        for i in range(count):
            values = {name.replace("__", "/"): series[name][i] for name in series if i < len(series[name])}
            sink.log(i + 1, {"rollout/raw_reward": 0.5, **values})
    return folder


def unpack(text: str) -> Any:
    """The value that the page has as `text`, as its script unpacks it."""
    return json.loads(zlib.decompress(base64.b64decode(text), -15))
