"""The samples that a run has saved, against a model of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def check(rows: list[dict[str, Any]], model_folder: Path) -> None:
    """Fields run over the response; sampled tokens have the model's log-probs, others mask 0 and log-prob 0."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    for row in rows:
        count = row["response_length"]
        assert len(row["loss_mask"]) == len(row["rollout_log_probs"]) == len(row["weight_versions"]) == count
        assert row["weight_versions"] == sorted(row["weight_versions"])
        tokens = torch.tensor(row["tokens"])[None]
        with torch.no_grad():
            log_probs = model(tokens).logits[0].log_softmax(-1)[-count - 1 : -1]
        wanted = log_probs.gather(-1, tokens[0, -count:, None])[:, 0].numpy()
        found = np.array(row["rollout_log_probs"])
        sampled = found != 0
        assert np.abs(found - wanted)[sampled].max() <= 1e-4
        assert not np.any(np.array(row["loss_mask"])[~sampled])


def count_tool_answers(rows: list[dict[str, Any]], model_folder: Path, answer: str) -> int:
    """Check that a tool's answer is all that is masked; returns how many samples have a turn on both sides of it."""
    tool = AutoTokenizer.from_pretrained(model_folder).encode(answer, add_special_tokens=False)
    both = 0
    for row in rows:
        response, mask = row["tokens"][-row["response_length"] :], row["loss_mask"]
        places = [i for i in range(len(mask) - len(tool) + 1) if response[i : i + len(tool)] == tool]
        masked = [i for i, trained in enumerate(mask) if not trained]
        if masked:
            both += masked[-1] < len(mask) - 1
            assert masked == list(range(masked[0], masked[0] + len(tool))) and masked[0] in places
    return both
