"""Sparse attention (DSA) within its top-k is DeepSeek-V3: transformers' logits and gradients; indexers stay as read."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fusionrl.models.shape import read_model_shape
from tests.trainer import hf_models, trainer_worker
from tests.trainer.test_parity import assert_close
from tests.trainer.trainer_worker import Samples, config_of
from tools.parity import all_logits, checkpoint_gradients


@pytest.mark.parametrize("family", hf_models.SPARSE)
def test_within_its_top_k_it_attends_to_all(workers, hf, tmp_path, family):
    folder, model = hf(family, False)
    shape, samples = read_model_shape(folder), Samples(6, seed=3)
    assert max(map(len, samples.tokens)) <= shape.max_position_embeddings == 64 < model.config.max_position_embeddings
    workers.start(config_of(folder, "sft"))
    (shard,) = samples.shards(micro=3)
    (packed,) = workers.run(all_logits, shard, [list(range(6))])[0]
    with torch.no_grad():
        plain = [model(torch.tensor(t[:-1], dtype=torch.long)[None]).logits[0].numpy() for t in samples.tokens]
    assert np.abs(packed - np.concatenate(plain)).max() <= shape.logit_bound

    metrics, trained = workers.train([shard]), hf_models.clone(model)
    loss = hf_models.loss(trained, samples, list(range(6)), "sft")
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_close(workers.run(trainer_worker.gradients)[0], checkpoint_gradients(trained), 1e-4)

    workers.call("save_hf", str(tmp_path / "out"))
    found, want = (load_file(path / "model.safetensors") for path in (tmp_path / "out", folder))
    assert found.keys() == want.keys()
    indexers = [name for name in want if ".indexer." in name]
    assert indexers and all(torch.equal(found[name], want[name]) for name in indexers)
