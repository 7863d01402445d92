"""Models that see, trained with images: against transformers, in every layout, with and without their towers."""

from __future__ import annotations

import shutil
from collections import ChainMap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fusionrl.models import families
from fusionrl.models.hf_io import HFReader
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.layout import TrainerLayout
from tests.tiny_vision import HYBRIDS, KIMI, KINDS, Reference, make_tiny_vlm, random_image
from tests.trainer import trainer_worker
from tests.trainer.trainer_worker import Failed, LocalRanks, config_of
from tests.trainer.vision_samples import VisionSamples, gradients_of
from tools.parity_rows import FULL, OVERLAP

SEES: dict[str, Any] = {"multimodal_keys": {"image": "images"}, "calculate_per_token_loss": True}
ONE = TrainerLayout(1)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


class Case:
    """A tiny model in a folder, samples, and transformers' numbers of them."""

    def __init__(self, kind: str, folder: Path, **sizes: int) -> None:
        self.kind, self.folder, self.samples = kind, folder, VisionSamples(kind)
        model = make_tiny_vlm(folder, kind, **sizes)
        self.log_probs, self.loss, self.gradients = self.samples.reference(folder, model if kind == KIMI else None)

    def assert_equals(self, workers: LocalRanks, layout: TrainerLayout, passed: Any = None, **flags: Any) -> None:
        """Log-probs, loss and the gradient of every tensor in this layout."""
        workers.start(config_of(self.folder, "sft", passed, **SEES, **flags), layout)
        shards = self.samples.shards(layout.dp)
        scores = workers.on_shards("score", shards)
        for dp in range(layout.dp):
            ids = range(dp, len(self.samples), layout.dp)
            own = scores[layout.ranks_of_dp(dp)[0]]
            assert max(abs(got - self.log_probs[i]).max() for got, i in zip(own, ids, strict=True)) <= 1e-5
        metrics = workers.train(shards, layout)
        assert metrics["train/loss"] == pytest.approx(self.loss, rel=1e-5)
        got = workers.run(trainer_worker.gradients)[0]
        assert got.keys() == self.gradients.keys()
        for name, want in self.gradients.items():
            assert np.linalg.norm(got[name] - want) <= 1e-4 * np.linalg.norm(want), name


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    cases: dict[str, Case] = {}

    def make(kind: str) -> Case:
        if kind not in cases:
            cases[kind] = Case(kind, tmp_path_factory.mktemp(kind))
        return cases[kind]

    return make


def layouts(kind: str) -> list[TrainerLayout]:
    """Those of two ranks; four at a time are rows of `tools/parity.py`."""
    sizes: list[dict[str, int]] = [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}]
    mixed = [{"ep": 2}] if kind.endswith("moe") or kind == KIMI else []
    # The decoder of the others has two or three layers, and the first stage those of deepstack.
    fit = [size for size in sizes if kind in ("qwen2_5_vl", KIMI, *HYBRIDS) or "pp" not in size]
    return [ONE, *(TrainerLayout(2, **size) for size in [*fit, *mixed])]


@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind in (*KINDS, *HYBRIDS, KIMI) for layout in layouts(kind)], ids=str
)
def test_log_probs_and_gradients_equal_transformers(
    workers: LocalRanks, case: Callable[[str], Case], kind: str, layout: TrainerLayout
) -> None:
    case(kind).assert_equals(workers, layout)


@pytest.mark.parametrize(
    ("kind", "passed", "flags"),
    [
        ("qwen3_vl", {"transformer": FULL}, {"vision_recompute": False}),
        ("qwen2_5_vl", {"transformer": FULL}, {}),
        ("qwen3_vl", {}, {"share_prompts": False}),
        ("qwen3_vl", {"ddp": OVERLAP}, {}),
        ("qwen3_vl", {"transformer": {"sequence_parallel": False}}, {}),
    ],
    ids=["recompute", "recompute everything", "prompts apart", "overlapped", "no sequence parallel"],
)
def test_other_ways_give_the_same(
    workers: LocalRanks, case: Callable[[str], Case], kind: str, passed: Any, flags: dict[str, Any]
) -> None:
    case(kind).assert_equals(workers, TrainerLayout(2, tp=2) if passed else ONE, passed, **flags)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", KIMI])
def test_the_tower_alone_equals_transformers(tmp_path: Path, kind: str) -> None:
    """Features, those of deepstack, and gradients; images that windows do not divide, and one twice as wide."""
    from fusionrl.trainer.vision_tower import TOWERS, PixelScale

    model = make_tiny_vlm(tmp_path, kind)
    seeing, shape = Reference(tmp_path, model), read_model_shape(tmp_path, sees=True)
    assert shape.vision is not None
    scale = PixelScale(*(tuple(seeing.numbers[name]) for name in ("image_mean", "image_std")))
    tower = TOWERS[type(shape.vision)](shape.vision, scale, recompute=True)
    rules = {rule.megatron.removeprefix("vision_model."): rule for rule in shape.vision.rules()}
    reader = HFReader(tmp_path)
    tower.load_state_dict({name: reader.get(*next(iter(rule.hf.items()))) for name, rule in rules.items()})
    images = [random_image(i, *size, patch=seeing.patch) for i, size in enumerate([(4, 4), (6, 8), (10, 4), (6, 8)])]
    wanted, pixels = seeing.features(images)
    found = torch.cat([tower.patches(torch.from_numpy(image)) for image in images]).numpy()
    assert np.abs(np.sort(found, None) - np.sort(pixels, None)).max() <= 1e-6
    features, deep = tower([torch.from_numpy(image) for image in images])
    assert len(deep) == len(wanted) - 1 == len(shape.vision.deepstack)
    weights = torch.randn_like(features)
    for got, want in zip([features, *deep], wanted, strict=True):
        assert (got - want).abs().max() <= 1e-5
    for outputs in ([features, *deep], wanted):
        sum((part * weights).sum() for part in outputs).backward()
    gradients = gradients_of(model)
    for name, parameter in tower.named_parameters():
        want = torch.from_numpy(gradients[next(iter(rules[name].hf))])
        assert (parameter.grad - want).norm() <= 1e-5 * want.norm(), name


def weights_after(workers: LocalRanks, samples: VisionSamples, steps: int = 2) -> dict[str, np.ndarray]:
    for step in range(steps):
        workers.train(samples.shards(), None, step)
    return workers.run(trainer_worker.weights)[0]


@pytest.mark.parametrize(
    ("kind", "layout", "flags", "is_frozen"),
    [
        ("qwen3_vl", ONE, {"freeze_vision": True}, lambda name: name.startswith("visual.")),
        (
            "qwen3_vl",
            ONE,
            {"freeze_params_name_list": ["embed_tokens", r"visual\.blocks\.0"]},
            lambda name: "embed_tokens" in name or "visual.blocks.0" in name,
        ),
        (  # nothing of the last stage is trained
            "qwen2_5_vl",
            TrainerLayout(2, pp=2),
            {"only_train_params_name_list": ["vision_model.merger"]},
            lambda name: not name.startswith("visual.merger"),
        ),
    ],
    ids=["vision", "some", "all but"],
)
def test_frozen_parameters_stay_as_they_are(
    workers: LocalRanks,
    case: Callable[[str], Case],
    kind: str,
    layout: TrainerLayout,
    flags: dict[str, Any],
    is_frozen: Callable[[str], bool],
) -> None:
    """To the bit, also after their memory was given away; and all others change."""
    one = case(kind)
    passed = {"transformer": FULL} if "freeze_params_name_list" in flags else None
    workers.start(config_of(one.folder, "sft", passed, **SEES, **flags, lr=1e-2), layout)
    before = workers.run(trainer_worker.weights)[0]
    workers.call("offload")
    after = weights_after(workers, one.samples)
    assert {name for name, x in after.items() if np.array_equal(x, before[name])} == {n for n in before if is_frozen(n)}


def test_overlap_where_a_rank_has_no_images(workers: LocalRanks, case: Callable[[str], Case]) -> None:
    """Its tower's buckets are gathered and reduced in the order of the other rank's.

    Scores and weights are those of a run without overlap, also where no rank has an image.
    """
    one, found = case("qwen3_vl"), []
    steps = [[[0], [3]], [[4], [5]]], [[[3], [6]], [[1], [7, 2]]], [[[3]], [[6]]]
    counts = [one.samples.count([i for rank in step for micro in rank for i in micro]) for step in steps]
    shards = [one.samples.shard([step[rank] for step in steps], counts) for rank in range(2)]
    for ddp in ({}, OVERLAP):
        workers.start(config_of(one.folder, "sft", {"ddp": ddp}, **SEES, lr=1e-2), TrainerLayout(2))
        workers.run(hook_of_a_user)
        workers.train(shards)
        scores = workers.on_shards("score", shards)
        found.append([x for own in scores for x in own] + [*workers.run(trainer_worker.weights)[0].values()])
    assert all(np.abs(x - want).max() <= 1e-5 for want, x in zip(*found, strict=True))


def hook_of_a_user(actor: Any) -> None:
    """Before calls of the output layer, which the trainer does not call: it reads the weight."""
    from fusionrl.trainer.model import unwrap

    def fails(module: Any, args: Any, kwargs: Any) -> None:
        raise AssertionError

    unwrap(actor.trained.chunks[0]).output_layer.register_forward_pre_hook(fails, with_kwargs=True)


def test_same_text_with_other_images_is_not_shared(workers: LocalRanks, case: Callable[[str], Case]) -> None:
    """Of three prompts of the same ids two have the same image."""
    one = case("qwen3_vl")
    workers.start(config_of(one.folder, "sft", **SEES))
    shard = one.samples.shard([[[0, 1, 2]]], [one.samples.count([0, 1, 2])])
    (packed,) = workers.run(trainer_worker.num_packed_tokens, shard)[0]
    prompt, responses = 5 + 4 + 7, 9 + 6 + 8
    assert packed == 2 * prompt + responses - 3
    blind = replace(shard, spans=[[], [], []], images={})
    assert workers.run(trainer_worker.num_packed_tokens, blind)[0] == [prompt + responses - 3]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("qwen2_5_vl", {"pp": 2}), ("qwen3_vl", {"tp": 2}), ("qwen3_vl_moe", {"ep": 2}), (KIMI, {"tp": 2})],
    ids=str,
)
def test_what_is_saved_and_pushed(
    workers: LocalRanks, case: Callable[[str], Case], tmp_path: Path, kind: str, sizes: dict[str, int]
) -> None:
    """A folder as the source is, to the bit, which transformers loads; pushes have the engines' names."""
    one, layout = case(kind), TrainerLayout(2, **sizes)
    workers.start(config_of(one.folder, "sft", **SEES, lr=0.0), layout)
    workers.train(one.samples.shards(layout.dp), layout)
    workers.call("save_hf", str(tmp_path / "out"))
    want, found = tensors_of(one.folder), tensors_of(tmp_path / "out")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    if kind != KIMI:  # of which transformers has no class
        log_probs, *_ = VisionSamples(kind).reference(tmp_path / "out")
        assert all(np.array_equal(*pair) for pair in zip(log_probs, one.log_probs, strict=True))
    parts = workers.run(trainer_worker.gathered, "float32")
    pushed = ChainMap(*(part for part, _, _ in parts))
    reader, shape = HFReader(one.folder), read_model_shape(one.folder, sees=True)
    assert pushed.keys() == families.hf_shapes(shape).keys()
    for name, tensor in pushed.items():
        assert torch.equal(tensor, reader.get(name, tensor.shape)), name
    assert {int(line.split()[1]) for line in parts[0][1] if line.startswith("visual.")} == {0}


def test_a_checkpoint_is_read_in_any_layout(workers: LocalRanks, case: Callable[[str], Case], tmp_path: Path) -> None:
    """Weights to the bit; and the run continues as it would have, also where the tower is frozen."""
    one, path = case("qwen3_vl"), str(tmp_path / "checkpoint")
    every: list[dict[str, Any]] = [{}, {"freeze_vision": True}]
    for flags in every:
        config = config_of(one.folder, "sft", **SEES, **flags, lr=1e-2)
        workers.start(config, TrainerLayout(2, tp=2))
        shards = one.samples.shards(1)
        workers.train(shards, None, 0)
        saved = workers.run(trainer_worker.weights)[0]
        workers.call("save", path, 0)
        workers.train(shards, None, 1)
        after = workers.run(trainer_worker.weights)[0]
        for layout in (TrainerLayout(2, tp=2), TrainerLayout(2, cp=2), ONE):
            workers.start(config, layout)
            workers.call("load", path)
            loaded = workers.run(trainer_worker.weights)[0]
            assert all(np.array_equal(loaded[name], x) for name, x in saved.items())
            workers.train(shards, None, 1)
            trained = workers.run(trainer_worker.weights)[0]
            for name, x in after.items():
                if layout.tp == 2:
                    assert np.array_equal(trained[name], x), name
                else:
                    assert np.abs(trained[name] - x).max() <= 1e-4, name
        shutil.rmtree(path)


def test_features_of_a_frozen_tower_are_not_those_of_the_reference(
    workers: LocalRanks, case: Callable[[str], Case], tmp_path: Path
) -> None:
    """Whose tower is another one; and each image passes a tower once a rollout."""
    one = case("qwen3_vl")
    make_tiny_vlm(tmp_path, "qwen3_vl", seed=3)
    other, *_ = one.samples.reference(tmp_path)
    workers.start(config_of(one.folder, "sft", **SEES, freeze_vision=True))
    workers.call("read_weights", "ref", str(tmp_path), "--ref-load")
    (shard,) = one.samples.shards()
    for weights, want in ((None, one.log_probs), ("ref", other), (None, one.log_probs)):
        scores: Any = workers.call("score", shard, weights)[0]
        assert max(abs(got - x).max() for got, x in zip(scores, want, strict=True)) <= 1e-5
    assert workers.run(num_passes, shard)[0] == [4, 4, 4]


def num_passes(actor: Any, shard: Any) -> list[int]:
    """Images that have passed the tower after scoring, after a step, and after another of the same rollout."""
    from fusionrl.trainer.model import forget_images
    from fusionrl.trainer.score import score_samples

    passed, counts = [], []
    handle = tower_of(actor).register_forward_pre_hook(lambda _, inputs: passed.extend(inputs[0]))
    for _ in range(3):
        score_samples(shard, actor.scorer)
        counts.append(len(passed))
    handle.remove()
    forget_images(actor.trained)
    return counts


@pytest.mark.parametrize("layout", [TrainerLayout(2, tp=2), pytest.param(ONE, marks=ON_GPU)], ids=str)
def test_in_bf16(workers: LocalRanks, case: Callable[[str], Case], tmp_path: Path, layout: TrainerLayout) -> None:
    """Losses differ by rounding; with the tower frozen as well. As text, images would be twice as far off."""
    for kind in KINDS if layout == ONE else KINDS[:2]:
        one = (
            Case(kind, tmp_path / kind, hidden=256) if layout == ONE else case(kind)
        )  # wide enough for a GPU's kernels
        wrong, *_ = one.samples.reference(one.folder, as_text=True)
        bound = min(0.1, max(abs(got - want).mean() for got, want in zip(wrong, one.log_probs, strict=True)) / 2)
        every: list[dict[str, Any]] = [{}, {"freeze_vision": True}]
        for flags in every:
            workers.start(config_of(one.folder, "sft", precision="bf16", **SEES, **flags), layout)
            shards = one.samples.shards()
            scores: Any = workers.call("score", shards[0])[0]
            assert max(abs(got - want).mean() for got, want in zip(scores, one.log_probs, strict=True)) <= bound
            assert workers.train(shards)["train/loss"] == pytest.approx(one.loss, rel=0.02)


@pytest.mark.parametrize("is_trained", [False, True])
def test_features_in_bf16_enter_hidden_states_in_fp32(is_trained: bool) -> None:
    """As by --fp32-residual-connection, which layers without Transformer Engine lack. Autograd gives the same."""
    from fusionrl.trainer.vision import ImageRows, _Add, _Merge

    rows, sources = torch.tensor([1, 2, 5, 6]), torch.tensor([0, 1, 0, 1])
    images, hidden = ImageRows({}, rows, sources), torch.randn(8, 4, requires_grad=True)
    features, deep = (torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=is_trained) for _ in range(2))
    images.deep, inputs = [deep.detach()], [hidden, features, deep] if is_trained else [hidden]
    merged = _Merge.apply(hidden, images, features, deep)
    out = _Add.apply(merged[:, None], images, images.deep[0], 0)[:, 0]
    want = hidden.index_copy(0, rows, features[sources].float()).index_add(0, rows, deep[sources].float())
    assert torch.equal(out, want) and len(images.grads) == is_trained
    weights = torch.randn(8, 4).bfloat16().float()
    for got, grad in zip(*(torch.autograd.grad((x * weights).sum(), inputs) for x in (out, want)), strict=True):
        assert got.dtype is grad.dtype and torch.allclose(got, grad, rtol=1e-2)


def test_replicas_of_a_tower_stay_the_same(workers: LocalRanks, case: Callable[[str], Case]) -> None:
    """Tensor-parallel ranks, whose kernels may add in another order; with sequence parallelism or without."""
    one = case("qwen3_vl")
    for is_divided in (False, True):
        passed = {"transformer": {"sequence_parallel": is_divided}}
        workers.start(config_of(one.folder, "sft", passed, **SEES, lr=1e-2), TrainerLayout(2, tp=2))
        workers.run(lean)
        workers.train(one.samples.shards())
        ours, theirs = workers.run(tower_weights)
        assert all(np.array_equal(theirs[name], x) for name, x in ours.items())


def lean(actor: Any) -> None:
    """Change the tower's gradients on all ranks but the first."""
    for parameter in tower_of(actor).parameters():
        parameter.register_hook(lambda grad: grad + 0.1 * actor.rank)


def tower_weights(actor: Any) -> dict[str, np.ndarray]:
    return {name: x.detach().numpy().copy() for name, x in tower_of(actor).named_parameters()}


def tower_of(actor: Any) -> torch.nn.Module:
    from fusionrl.trainer.model import unwrap

    return unwrap(actor.trained.chunks[0]).vision_model


def test_a_users_model_without_a_tower_is_refused(workers: LocalRanks, case: Callable[[str], Case]) -> None:
    provider = f"{Path(__file__).with_name('train_hooks.py')}:plain_gpt"
    with pytest.raises(Failed, match=r"plain_gpt: it returned a \w+, which has no vision tower, for a run with images"):
        workers.start(config_of(case("qwen3_vl").folder, "sft", **SEES, custom_model_provider_path=provider))
