"""Layers of multi-token prediction against transformers' own in a plain loop over samples, and on their way out."""

from collections import ChainMap
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

from fusionrl.checks.model import further_layer_errors
from fusionrl.plan.layout import TrainerLayout
from tests.trainer import hf_models, trainer_worker
from tests.trainer.test_parity import assert_close
from tests.trainer.trainer_worker import Samples, config_of
from tools.parity import checkpoint_gradients

FACTOR = 0.3
ON: dict[str, Any] = {"enable_mtp_training": True, "mtp_loss_scaling_factor": FACTOR}
QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm",
    "mtp_block": "mtp.layers.0",
}
MIMO = {
    "enorm": "token_layernorm.",
    "hnorm": "hidden_layernorm.",
    "eh_proj": "input_proj.",
    "post_norm": "final_layernorm.",
    "mtp_block": "",
}


class Further(torch.nn.Module):
    """`count` layers over a model of transformers, whose last decoder layer they resemble."""

    def __init__(self, model: Any, count: int) -> None:
        super().__init__()
        self.config, self.trunk = model.config, [model]  # a list: not a module of this one
        self.config.mtp_hidden_states_first = self.config.model_type == "qwen2"
        last, norm = model.model.layers[-1], type(model.model.norm)
        place = len(model.model.layers) - 1
        self.layers = torch.nn.ModuleList(MtpLayer(self.config, type(last), norm, place) for _ in range(count))
        random = torch.Generator().manual_seed(7)
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            std = 0.5 if name.endswith("gate.weight") else 0.1
            noise = std * torch.randn(tensor.shape, generator=random)
            tensor.data = noise if tensor.dim() > 1 or "bias" in name else tensor.data + noise

    def name(self, own: str) -> str:
        """The name that checkpoints have for a tensor of this module."""
        _, number, part, rest = own.split(".", 3)
        if self.config.model_type == "qwen2":
            return f"model.mtp_layers.{number}.{MIMO[part]}{rest}"
        if self.config.model_type.startswith("qwen"):
            return f"{QWEN[part]}.{rest}"
        prefix = f"model.layers.{len(self.trunk[0].model.layers) + int(number)}"
        return f"{prefix}.{ {'mtp_block': '', 'post_norm': 'shared_head.norm.'}.get(part, part + '.') }{rest}"

    def gradients(self) -> dict[str, np.ndarray]:
        return {self.name(name): value for name, value in checkpoint_gradients(self).items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        for param in self.parameters():
            param.grad = param.detach().clone()
        found = {name: torch.from_numpy(value) for name, value in self.gradients().items()}
        self.zero_grad()
        return found | {self.name(name): buffer for name, buffer in self.named_buffers() if "correction_bias" in name}

    def loss(self, samples: Samples) -> Any:
        """Mean over layers and trained tokens of -log p."""
        (model,), total = self.trunk, torch.zeros(())
        for i in range(len(samples)):
            tokens = torch.tensor(samples.tokens[i], dtype=torch.long)
            trained = int(samples.total[i] - samples.response[i]) + np.flatnonzero(samples.mask[i])
            with torch.no_grad():
                hidden = model.model(tokens[None]).last_hidden_state
            for depth, layer in enumerate(self.layers, 1):
                if len(tokens) <= depth + 1:
                    break
                embeds = model.model.embed_tokens(tokens[None, depth:]).detach()
                places = torch.arange(len(tokens) - depth)[None]
                mask = torch.full((places.size(1),) * 2, -torch.inf).triu(1)[None, None]
                rope = model.model.rotary_emb(embeds, places)
                hidden = layer(embeds, hidden[:, : places.size(1)], rope, mask, places, None)
                log_probs = (hidden[0] @ model.lm_head.weight.detach().t()).log_softmax(-1)
                total = total - sum(log_probs[j - 1 - depth, tokens[j]] for j in trained if j > depth)
        return total / len(self.layers) / samples.count(range(len(samples)))[0]


@pytest.fixture(scope="module")
def published(hf, tmp_path_factory):
    """published(family, count) -> (folder with further layers, transformers' model, those layers)."""
    made: dict[Any, Any] = {}

    def get(family: str, count: int = 1, **values: Any) -> tuple[Any, Any, Further]:
        key = (family, count, repr(values))
        if key not in made:
            plain, model = hf(family, False, **values)
            folder, further = tmp_path_factory.mktemp(f"{family}-{count}"), Further(model, count)
            (folder / "config.json").write_text((plain / "config.json").read_text())
            tensors = load_file(plain / "model.safetensors") | further.tensors()
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
            made[key] = folder, model, further
        return made[key]

    return get


def assert_step(workers, metrics, model, further, samples) -> None:
    """Both losses, and every gradient."""
    trained = hf_models.clone(model)
    loss = hf_models.loss(trained, samples, list(range(len(samples))), "sft")
    loss.backward()
    further.zero_grad()
    ahead = further.loss(samples)
    (FACTOR * ahead).backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/mtp_loss"] == pytest.approx(ahead.item(), rel=1e-5)
    want = checkpoint_gradients(trained) | further.gradients()
    assert_close(workers.run(trainer_worker.gradients)[0], want, 1e-4)


@pytest.mark.parametrize(
    ("family", "count"),
    [("glm4_moe", 1), ("deepseek_v3", 2), ("mimo", 1), ("qwen3_5_text", 1), ("qwen3_next", 1)],
)
def test_losses_and_gradients_equal_transformers_and_the_rest_of_the_model_sees_nothing(
    workers, hf, published, family, count
):
    folder, model, further = published(family, count)
    samples = Samples(7, seed=3)
    workers.start(config_of(hf(family, False)[0], "sft"))
    plain = workers.train(samples.shards(micro=4))
    alone = workers.run(trainer_worker.gradients)[0]
    workers.start(config_of(folder, "sft", mtp_num_layers=count, **ON))
    metrics = workers.train(samples.shards(micro=4))
    assert_step(workers, metrics, model, further, samples)
    found = workers.run(trainer_worker.gradients)[0]
    assert all(np.array_equal(found[name], value) for name, value in alone.items())
    assert "train/mtp_loss" not in plain and metrics["train/loss"] == plain["train/loss"]


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("family", "sizes", "passed"),
    [
        ("glm4_moe", {}, RECOMPUTED),
        ("glm4_moe", {"tp": 2}, {}),
        ("glm4_moe", {"pp": 2}, {}),
        ("glm4_moe", {"pp": 2, "vpp": 2}, RECOMPUTED),
        ("deepseek_v3", {"cp": 2}, {}),
        ("deepseek_v3", {"ep": 2}, {}),
        ("qwen3_next", {"tp": 2, "etp": 2}, RECOMPUTED),
    ],
    ids=str,
)
def test_layouts(workers, published, family, sizes, passed):
    values = {"num_hidden_layers": 4} if "vpp" in sizes else {}
    count = 2 if "cp" in sizes else 1
    folder, model, further = published(family, count, **values)
    samples, layout = Samples(7, seed=5), TrainerLayout(2, **sizes)
    workers.start(config_of(folder, "sft", {"transformer": passed}, mtp_num_layers=count, **ON), layout)
    for step in range(2):  # the second by weights that have moved alike on all ranks
        metrics = workers.train(samples.shards(layout.dp, micro=2), layout, step)
        if step == 0:
            assert_step(workers, metrics, model, further, samples)
    first = metrics["train/mtp_loss"]
    workers.start(config_of(folder, "sft", mtp_num_layers=count, **ON))
    for step in range(2):
        metrics = workers.train(samples.shards(micro=2), None, step)
    assert first == pytest.approx(metrics["train/mtp_loss"], rel=1e-3)


def test_an_embedding_that_is_frozen(workers, published):
    """The last stage of several pieces has one in a piece that is not its first."""
    folder, layout = published("glm4_moe", num_hidden_layers=4)[0], TrainerLayout(2, pp=2, vpp=2)
    frozen = {"freeze_params_name_list": ["embed_tokens"]}
    workers.start(config_of(folder, "sft", {"transformer": RECOMPUTED}, **ON, **frozen), layout)
    before = workers.run(trainer_worker.weights)[0]
    workers.train(Samples(7, seed=5).shards(micro=2), layout)
    after = workers.run(trainer_worker.weights)[0]
    kept = {name for name, x in before.items() if np.array_equal(after[name], x)}
    assert {name for name in kept if not name.endswith("correction_bias")} == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(("family", "sizes"), [("deepseek_v3", {"pp": 2}), ("qwen3_5_text", {"tp": 2})])
def test_they_are_saved_as_they_were_read_and_pushed_where_they_are_trained(
    workers, published, tmp_path, family, sizes, trains
):
    folder, _, further = published(family)
    flags = ON if trains else {}
    workers.start(config_of(folder, lr=0.0, **flags), TrainerLayout(2, **sizes))
    workers.train(Samples(4).shards(), TrainerLayout(2, **sizes))
    workers.call("save_hf", str(tmp_path / "out"))
    found, want = (load_file(path / "model.safetensors") for path in (tmp_path / "out", folder))
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    answers = workers.run(trainer_worker.gathered, "float32")
    pushed = ChainMap(*(part for part, _, _ in answers))
    assert pushed.keys() == (want.keys() if trains else want.keys() - further.tensors().keys())
    assert all(torch.equal(tensor, want[name]) for name, tensor in pushed.items())


@pytest.mark.parametrize("masks", [{}, {"padding_mask": None}], ids=["0.16", "0.19"])
def test_what_megatron_asks_of_the_layer(masks: dict[str, None], monkeypatch: pytest.MonkeyPatch) -> None:
    """0.19 hands a mask through, and recomputes the layer without saying by which function."""
    from fusionrl.cpu import megatron_patches

    megatron_patches.install()
    from fusionrl.trainer import multi_token

    monkeypatch.setattr(multi_token, "checkpoint", lambda run, _, *tensors: run(*tensors))
    layer = multi_token.PredictionLayer.__new__(multi_token.PredictionLayer)
    torch.nn.Module.__init__(layer)
    layer.hidden_first = False
    tokens, hidden = torch.arange(3)[None], torch.randn(3, 1, 2)
    given = {"input_ids": tokens, "position_ids": tokens, "hidden_states": hidden} | masks
    *same, embeddings, after = layer._get_embeddings(embedding=lambda input_ids, position_ids: input_ids + 1, **given)
    assert len(same) == 2 + len(masks) and all(one is None or one is tokens for one in same)
    assert torch.equal(embeddings, tokens + 1) and after is hidden
    layer._proj_and_transformer_layer = lambda hidden_states, decoder_input, **unused: 2 * hidden_states + decoder_input
    function = () if masks else (layer._proj_and_transformer_layer,)
    out = layer._checkpointed_forward(*function, hidden_states=hidden, decoder_input=hidden, **masks)
    assert torch.equal(out, 3 * hidden)


def test_a_resume_is_bit_exact(workers, published, tmp_path):
    folder, _, _ = published("qwen3_next")
    layout, path = TrainerLayout(2, pp=2), str(tmp_path / "checkpoint")
    config = config_of(folder, "sft", **ON)

    def step(number: int) -> dict[str, float]:
        return workers.train(Samples(6, seed=number).shards(1, 2), layout, number)

    workers.start(config, layout)
    step(0)
    workers.call("save", path, 0)
    want = step(1), workers.call("state_hashes")
    workers.start(config, layout)
    workers.call("load", path)
    assert (step(1), workers.call("state_hashes")) == want
    # It has the one layer, and no second.
    loads = [("--megatron-checkpoint", {"megatron_checkpoint": path}), ("--ref-load", {"ref_load": path})]
    for flag, values in loads:
        assert further_layer_errors(config_of(folder, "sft", **ON, **values)) == []
        (error,) = further_layer_errors(config_of(folder, "sft", **ON, **values, mtp_num_layers=2))
        assert error.startswith(f"{flag} {path}: it lacks layer 1 of multi-token prediction; ")


@pytest.mark.parametrize(("family", "count", "has_own"), [("glm4_moe", 1, True), ("deepseek_v3", 2, False)])
def test_reference_weights_need_no_such_layers(workers, hf, published, family, count, has_own):
    """Those of the same folder may have them, however many."""
    folder, _, _ = published(family, count)
    plain = str(hf(family, False)[0]) if has_own else None
    flags = ON | {"mtp_num_layers": count, "ref_load": plain}
    workers.start(config_of(folder, use_kl_loss=True, kl_loss_coef=0.1, **flags))
    metrics = workers.train(Samples(4).shards())
    assert abs(metrics["train/kl_loss"]) < 1e-9 and metrics["train/mtp_loss"] > 0
