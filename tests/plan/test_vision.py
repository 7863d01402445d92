"""Towers in the plan: what does not go with images, what is frozen, cost and balance of images."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl import cli
from fusionrl.config.config import Config, PassThrough
from fusionrl.models.families.vision import WindowTower
from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.models.trainable import frozen_names, frozen_tensors
from fusionrl.plan.balance import Balance, divide
from fusionrl.plan.costs import ImageCost, SequenceCost
from fusionrl.plan.devices import GIB
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.memory.engine import engine_memory, prefill_chunk, seeing_fraction, static_fraction
from fusionrl.plan.plan import plan_errors
from fusionrl.plan.trained_parts import frozen_of, image_cost, max_image_tokens, trains_tower, vision_errors
from fusionrl.plan.trainer_plan import auxiliary_config
from tests.tiny_vision import config_of, raw_config

SEES = {"multimodal_keys": {"image": "images"}}
TOWER_7B: dict[str, Any] = {"num_layers": 32, "hidden_size": 1280, "ffn_hidden_size": 3420, "num_heads": 16}
TOWER_7B |= {"patch_size": 14, "temporal_patch_size": 2, "channels": 3, "merge": 2, "out_hidden_size": 3584}
TOWER_7B |= {"image_token": 1, "mrope_section": (16, 24, 24)}

CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"  # of published models
GEOMETRY = ["--prompt-data", "geometry3k.parquet", "--rm-type", "math", "--apply-chat-template", "--num-rollout", "9"]
GEOMETRY += ["--rollout-batch-size", "128", "--n-samples-per-prompt", "8", "--colocate", "--max-tokens-per-gpu", "8192"]
GEOMETRY += ["--rollout-max-prompt-len", "2048", "--rollout-max-response-len", "2048", "--actor-num-gpus-per-node", "8"]
IMAGES = ["--multimodal-keys", '{"image": "images"}']


def shape_of(kind: str, **sizes: Any) -> ModelShape:
    return shape_from_hf_config(json.loads(config_of(kind, **sizes).to_json_string(use_diff=False)), sees=True)


def errors_of(shape: ModelShape, layout: TrainerLayout, transformer: Any = None, **flags: Any) -> list[str]:
    passed = PassThrough(transformer=transformer or {})
    return vision_errors(Config.from_flat({"hf_checkpoint": "x"} | SEES | flags, passed), layout, shape)


def test_features_enter_the_first_piece_of_a_pipeline() -> None:
    shape = shape_of("qwen3_vl", layers=4, depth=2)
    assert errors_of(shape, TrainerLayout(2, pp=2)) == []
    (error,) = errors_of(shape, TrainerLayout(4, pp=4))
    assert error.startswith(
        "the first of the model's 4 pipeline pieces has 1 layers, but features of images enter the "
    )
    (error,) = errors_of(shape, TrainerLayout(2, pp=2, vpp=2))
    assert "fewer virtual stages" in error
    assert errors_of(shape, TrainerLayout(2, pp=2), {"num_layers_in_first_pipeline_stage": 1})
    assert errors_of(shape_of("qwen2_5_vl", layers=4), TrainerLayout(4, pp=4)) == []


def test_what_does_not_go_with_images() -> None:
    shape, one = shape_of("qwen3_vl"), TrainerLayout(1)
    (error,) = errors_of(shape, one, {"apply_rope_fusion": True})
    assert error.startswith(
        "--multimodal-keys with --apply-rope-fusion: fused kernels know one position a token; leave"
    )
    (error,) = errors_of(shape, one, advantage_estimator="ppo")
    assert "a critic: it has no vision tower" in error
    blind = shape.model_copy(update={"vision": None})
    assert errors_of(blind, one, {"apply_rope_fusion": True}) == []


def test_what_is_frozen() -> None:
    shape = shape_of("qwen3_vl_moe")
    tower = frozen_of(Config.from_flat({"freeze_vision": True}), shape)
    assert tower and all(name.startswith("vision_model.") for name in tower)
    assert not trains_tower(Config.from_flat({"mode": "sft", "freeze_vision": True}), shape)
    assert trains_tower(Config.from_flat({"mode": "sft"}), shape)
    mergers = frozen_of(Config.from_flat({"only_train_params_name_list": ["merger"]}), shape)
    assert trains_tower(Config.from_flat({"mode": "sft", "only_train_params_name_list": ["merger"]}), shape)
    assert "embedding.word_embeddings.weight" in mergers and "vision_model.merger.linear_fc1.bias" not in mergers
    by_file = frozen_tensors(shape, (r"^model\.embed_tokens", r"visual\.pos_embed"), (), False)
    assert by_file == {"embedding.word_embeddings.weight", "vision_model.pos_embed.weight"}
    assert frozen_names(shape, by_file) == {"model.embed_tokens.weight", "visual.pos_embed.weight"}
    assert frozen_of(Config.from_flat({}), shape) == frozenset()


@pytest.mark.parametrize(
    ("freeze", "only", "message"),
    [
        (["vision_tower"], [], "--freeze-params-name-list vision_tower: no parameter has such a name; one of them is "),
        (["("], [], "--freeze-params-name-list (: no regular expression"),
        (["."], [], "--freeze-params-name-list: no parameter is left to train"),
        (["embed"], ["embed"], "exclude each other"),
        ([], ["vision_tower"], "--only-train-params-name-list vision_tower: no parameter has such a name"),
    ],
)
def test_patterns_that_cannot_be(freeze: list[str], only: list[str], message: str) -> None:
    flags = {"freeze_params_name_list": freeze, "only_train_params_name_list": only}
    (error,) = errors_of(shape_of("qwen3_vl"), TrainerLayout(1), **flags)
    assert message in error


def test_all_flags_are_named_by_which_nothing_is_left_to_train() -> None:
    only = [r"visual\.merger"]
    (error,) = errors_of(shape_of("qwen3_vl"), TrainerLayout(1), freeze_vision=True, only_train_params_name_list=only)
    assert error == "--only-train-params-name-list and --freeze-vision: no parameter is left to train"


def test_a_critic_trains_all_of_its_own() -> None:
    config = Config.from_flat({"freeze_vision": True, "freeze_params_name_list": ["merger"]})
    own = auxiliary_config(config, "critic").train
    assert not own.freeze_vision and not own.freeze_params_name_list


def test_stages_that_train_nothing_of_a_kind() -> None:
    """Megatron neither saves nor loads such states."""

    def errors(pp: int, shape: ModelShape, passed: PassThrough | None = None, **flags: Any) -> list[str]:
        sizes = {"actor_num_gpus_per_node": pp, "pipeline_model_parallel_size": pp}
        values = {"mode": "sft", "hf_checkpoint": "x"} | SEES | sizes | flags
        return plan_errors(Config.from_flat(values, passed or PassThrough()), 0, shape)

    dense, tied = (shape_of("qwen2_5_vl", layers=4, tie=tie) for tie in (False, True))
    mixed = shape_of("qwen3_vl_moe", layers=6)
    (error,) = errors(2, dense, only_train_params_name_list=["merger"])
    assert "stage 1 (layers 2 to 3) trains no parameters outside of experts, and a checkpoint" in error
    assert errors(1, dense, only_train_params_name_list=["merger"]) == []
    assert errors(2, dense, only_train_params_name_list=["merger"], no_save=True) == []
    assert errors(2, tied, freeze_params_name_list=["embed_tokens"]) == []
    (error,) = errors(1, mixed, only_train_params_name_list=["experts"])
    assert "stage 0 (layers 0 to 5) trains no parameters outside" in error
    (error,) = errors(2, mixed, freeze_params_name_list=[r"layers\.[345]\.mlp\.experts"])
    assert "stage 1 (layers 3 to 5) trains no experts, and a checkpoint" in error
    assert errors(2, mixed) == []
    passed = PassThrough(transformer={"num_layers_in_last_pipeline_stage": 0})
    (error,) = errors(2, dense, passed, only_train_params_name_list=["merger"])
    assert "stage 1 (no layers) trains no parameters outside" in error
    assert errors(1, mixed, freeze_params_name_list=["experts"]) == []


def test_cost_of_an_image() -> None:
    """Of Qwen2.5-VL-7B's tower, by a count of its parameters; attention within windows and to whole images."""
    tower = WindowTower(**TOWER_7B, window_size=112, full_layers=(7, 15, 23, 31))
    assert sum(int(np.prod(sizes)) for _, sizes in tower.tensors()) == 676_550_144
    forward = ImageCost.of_shape(tower, is_trained=False)
    blocks = 32 * (4 * 1280**2 + 3 * 1280 * 3420) + 3 * 2 * 14**2 * 1280
    mergers = 5120**2 + 5120 * 3584
    per_patch = 2 * blocks + 2 * mergers / 4
    assert per_patch == pytest.approx(1.29e9, rel=0.01)
    assert forward.linear == pytest.approx(4 * (per_patch + 28 * 4 * 1280 * 64))
    assert forward.quadratic == 4 * 4 * 1280 * 16
    assert forward(10) == forward.linear * 10 + forward.quadratic * 100
    assert ImageCost.of_shape(tower, is_trained=True)(10) == pytest.approx(3 * forward(10))


def test_ranks_and_micro_batches_of_samples_with_images() -> None:
    """Text and images mixed: ranks cost the same within 5 %, and a micro-batch has no more patches than allowed."""
    random = np.random.default_rng(5)
    config = Config.from_flat({"mode": "sft", "max_patches_per_gpu": 800} | SEES)
    shape = shape_of("qwen3_vl", tower=64)
    most = max_image_tokens(config, shape)
    assert most == 200
    cost, own_cost = SequenceCost(1e6, 1e2), image_cost(config, shape)
    balance = Balance(cost, 4096, share_prompts=True, images=own_cost, max_image_tokens=most)
    groups = [list(range(first, first + 4)) for first in range(0, 256, 4)]
    images: list[dict[str, int]] = []
    for group in groups:
        own = {f"{group[0]}-{i}": int(random.integers(4, 120)) for i in range(random.integers(0, 3))}
        images += [own] * 4
    prompts = np.repeat(random.integers(10, 40, 64), 4) + np.array([sum(own.values()) for own in images])
    lengths = prompts + random.integers(5, 400, 256)
    ranks = divide(lengths, prompts, groups, 4, balance, images)
    assert Counter(i for bins in ranks for part in bins for i in part) == Counter(range(256))
    costs = []
    for bins in ranks:
        total = 0.0
        for part in bins:
            different = {key: count for i in part for key, count in images[i].items()}
            assert sum(different.values()) <= 240, "the limit, or one sample with more"
            assert sum(different.values()) <= 200 or all(images[i] == images[part[0]] for i in part)
            firsts = {i - i % 4: i for i in reversed(part)}
            shared = [prompts[i] for i in part if firsts[i - i % 4] != i]
            total += balance.cost(lengths[part]).sum() - balance.cost(np.array(shared)).sum()
            assert balance.images is not None
            total += sum(map(balance.images, different.values()))
        costs.append(total)
    assert max(costs) / min(costs) < 1.05


def test_one_large_image_does_not_lift_the_limit_of_other_micro_batches() -> None:
    """And eight siblings that share it stay together."""
    own_cost = ImageCost(1.0, 0.0)
    balance = Balance(SequenceCost(1.0, 0.0), 10_000, share_prompts=True, images=own_cost, max_image_tokens=200)
    counts = [*[900] * 8, *[150] * 8, 0, 0]
    images = [{str(max(i, 7)): count} if count else {} for i, count in enumerate(counts)]
    lengths, groups = np.array([count + 10 for count in counts]), [[*range(8)], *([i] for i in range(8, 18))]
    ((*bins,),) = divide(lengths, lengths - 5, groups, 1, balance, images)
    assert sorted(max(counts[i] for i in part) for part in bins if part) == [*[150] * 8, 900]
    assert [part[:8] for part in bins if 0 in part] == [[*range(8)]]


@pytest.mark.parametrize(("kind", "more"), [("qwen3_vl", ()), ("kimi_vl", ("merger.",))])
def test_an_engine_of_two_devices_has_the_tower_once_or_twice(kind: str, more: tuple[str, ...]) -> None:
    """But for what each device has whole anyway."""
    shape = shape_from_hf_config(raw_config(kind, tower=64), sees=True)
    args: list[dict[str, object]] = [{}, {"mm_enable_dp_encoder": True}]
    found = [engine_memory(shape, 1e6, 2, "bf16", own, device_memory=None, on_cpu=True) for own in args]
    divided, whole = (memory.weights for memory in found if memory is not None)
    assert shape.vision is not None
    always = sum(map(shape.vision.num_weights, ("patch_embed.", "pos_embed.", *more)))
    assert (divided, whole) == (5e5 + always, 5e5 + shape.vision.num_weights())


def test_what_an_engine_leaves_for_a_tower() -> None:
    """By SGLang's rules; of Kimi-VL's files alone it reads the number of blocks."""
    args: list[dict[str, object]] = [{}, {"chunked_prefill_size": 512}, {"chunked_prefill_size": -1}]
    args.append(args[-1] | {"max_prefill_tokens": 4096})
    chunks = [prefill_chunk(80 * GIB, own) for own in args]
    assert chunks == [8192, 512, 16384, 4096]
    assert [static_fraction(80 * GIB, 1, chunk) for chunk in chunks] == [0.83, 0.875, 0.68, 0.875]
    shape = shape_of("qwen3_vl")
    found = [engine_memory(shape, 1e6, 1, "bf16", own, device_memory=80 * GIB, on_cpu=False) for own in args]
    images = [memory.images for memory in found if memory is not None]
    assert images == pytest.approx([images[0] * chunk / 8192 for chunk in chunks]) and images[0] > 0
    for kind, layers in (("kimi_vl", 27), ("qwen3_vl", 24)):
        vision = shape_from_hf_config(raw_config(kind), sees=True).vision
        assert vision is not None
        vision = vision.model_copy(update={"num_layers": 27, "hidden_size": 1152})
        factor = 1 - 0.1 * (layers * 1152**2 / (24 * 1024**2) - 1)
        assert seeing_fraction(vision) == pytest.approx(0.95 * factor)


def planned(name: str, nodes: int, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    config = str(CONFIGS / f"{name}.json")
    command = ["plan", "--cluster", f"{nodes}x8xh100", "--actor-num-nodes", f"{nodes}", "--hf-checkpoint", config]
    code = cli.main([*command, *GEOMETRY, *flags])
    text, errors = capsys.readouterr()
    assert code == 0, errors
    return text


def part(text: str, bar: str, name: str) -> float:
    """GiB of a part of a bar."""
    found = re.search(rf"{bar}: .*?\b{name} ([\d.]+)", text)
    return float(found[1]) if found is not None else 0.0


@pytest.mark.parametrize(("name", "nodes", "tp", "pp"), [("7b", 1, 2, 1), ("32b", 4, 8, 1), ("72b", 8, 8, 4)])
def test_published_models_fit_where_others_train_them(
    name: str, nodes: int, tp: int, pp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 8, 32 and 64 GPUs of 80 GB, as in NVIDIA's guide for verl."""
    sizes = ("--tensor-model-parallel-size", f"{tp}", "--pipeline-model-parallel-size", f"{pp}")
    engines = ("--rollout-num-gpus-per-engine", f"{max(tp // 2, 1)}")
    assert "verdict    fits: " in planned(f"qwen2.5-vl-{name}", nodes, capsys, *IMAGES, *sizes, *engines)


def test_memory_of_a_tower(capsys: pytest.CaptureFixture[str]) -> None:
    """Each tensor-parallel rank has it whole, an engine in its weights; a micro-batch full of images needs more."""
    name, tp = "qwen2.5-vl-7b", ("--tensor-model-parallel-size", "2")
    blind, sees = planned(name, 1, capsys, *tp), planned(name, 1, capsys, *tp, *IMAGES)
    frozen = planned(name, 1, capsys, *tp, *IMAGES, "--freeze-vision")
    count = 676_550_144
    for states, size in (("weights", 2), ("gradients", 4), ("optimizer", 12 / 4)):
        more = part(sees, "backward", states) - part(blind, "backward", states)
        assert more == pytest.approx(size * count / GIB, abs=0.1), states
        more = part(frozen, "backward", states) - part(blind, "backward", states)
        assert more == pytest.approx(size * count / GIB if states == "weights" else 0.0, abs=0.1), states
    # Features (7,168 bytes a token), and of each patch the inputs of 32 blocks and of the ends.
    patches = 4 * 8192 / 2
    kept = 8192 / 2 * 7168 + patches * 2 * (32 * 1280 + 5 * 1280 + 20 + 1176)
    assert part(sees, "backward", "images") == pytest.approx(kept / GIB, abs=0.01)
    few = planned(name, 1, capsys, *tp, *IMAGES, "--max-patches-per-gpu", "8192")
    assert part(few, "backward", "images") == pytest.approx(kept / 2 / GIB, abs=0.01)
    assert part(sees, "generation", "weights") == pytest.approx(8.292e9 * 2 / GIB, abs=0.05)
    # SGLang leaves more memory free, and the images of a prefill chunk of 8,192 tokens need less than that.
    images, cache = part(sees, "generation", "images"), part(blind, "generation", "KV cache")
    assert part(blind, "generation", "images") == 0.0 < images < 3
    assert part(sees, "generation", "KV cache") < cache - 2 * count / GIB - images
