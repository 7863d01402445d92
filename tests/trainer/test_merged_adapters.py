"""Adapters: the trainer computes as transformers does with the merged weights, and pushes these."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fusionrl.plan.layout import TrainerLayout
from tests.trainer import hf_models, trainer_worker
from tests.trainer.trainer_worker import Samples, config_of, merge_drawn

# One of each way of joining weights. Parts of all families: tests/weights/test_merge.py; gradients: tools/parity.py.
NAMES = ("phi3", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "gpt_oss", "short_conv")
FLAGS = {"lora_rank": 4, "lora_alpha": 16.0}


@pytest.mark.parametrize("family", NAMES)
def test_log_probs_and_pushes_are_those_of_merged_weights(workers, hf, tmp_path, family):
    folder, model = hf(family, False)
    config = config_of(folder, **FLAGS)
    out = merge_drawn(folder, config, tmp_path / "merged")
    merged = type(model).from_pretrained(out, config=model.config, attn_implementation="eager").eval()
    samples = Samples(5, seed=3)
    want, base = hf_models.all_log_probs(merged, samples), hf_models.all_log_probs(model, samples)
    assert np.abs(want - base).max() > 1e-2, "the adapters change something"
    files = load_file(out / "model.safetensors")
    for size in (1, 2):
        workers.start(config, TrainerLayout(size, tp=size))
        workers.run(trainer_worker.draw_adapters)
        (shard,) = samples.shards(micro=3)
        difference = np.abs(np.concatenate(workers.call("score", shard)[0]) - want).max()
        assert difference <= (1e-4 if family == "qwen3_5_text" else 5e-6), f"{difference:.1e} on {size} ranks"
        found = workers.run(trainer_worker.gathered, "float32", None, True)
        sent = {name: tensor for rank, _, _ in found for name, tensor in rank.items()}
        for name, tensor in found[0][2].items():
            assert torch.equal(tensor, sent[name]), f"{name}: a push by parts and an export differ"
            torch.testing.assert_close(tensor, files[name], rtol=0, atol=1e-6)
