"""Merged weights against W + scale · B A in float64, for every tensor of every family, whole and in parts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fusionrl.models import convert, families
from fusionrl.models.rules import Rule
from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.models.trainable import ADAPTER, AdapterSpec, adapter_rules
from fusionrl.weights.adapters import Merger, MergeSums
from fusionrl.weights.remote_calls import merge_loss
from tests.trainer import hf_models
from tools.family_loops import WITHOUT_MLP, adapter_flags

NAMES = [*hf_models.FAMILIES, *hf_models.SPARSE, *hf_models.PLUGINS]


def shape_of(family: str) -> ModelShape:
    config = hf_models.config_of(family, False)
    return shape_from_hf_config(json.loads(config.to_json_string(use_diff=False)) | {"model_type": family})


def draw(rules: dict[str, Rule], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Hugging Face or PEFT name → a random tensor."""
    return {name: torch.randn(s, generator=generator) for rule in rules.values() for name, s in rule.hf.items()}


def part_of(rule: Rule, tensors: dict[str, torch.Tensor], rank: int, size: int) -> torch.Tensor:
    return convert.split(rule, convert.join(rule, [tensors[name] for name in rule.hf]), rank, size)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", NAMES)
def test_merged_parts_are_those_of_merged_weights(family: str, size: int) -> None:
    shape = shape_of(family)
    spec = AdapterSpec(rank=3, alpha=4.0, excluded=("k_proj",) if size == 2 and family == "qwen3" else ())
    generator = torch.Generator().manual_seed(0)
    rules = {name: rule for name, rule in families.model_rules(shape).items() if not rule.stack}
    of_adapters = adapter_rules(shape, spec)
    weights, factors = draw(rules, generator), draw(of_adapters, generator)
    want = {name: tensor.double().numpy() for name, tensor in weights.items()}
    for name in {name.rpartition(".lora_")[0] for name in factors}:
        a, b = (factors[f"{name}.lora_{letter}.weight"].double().numpy() for letter in "AB")
        want[f"{name.removeprefix('base_model.model.')}.weight"] += 4 / 3 * b @ a
    num_changed = 0
    mergers = [
        Merger(
            {n: (r, part_of(r, factors, rank, size)) for n, r in of_adapters.items()},
            spec.scale,
            torch.float32,
            MergeSums(),
        )
        for rank in range(size)
    ]
    for rule in rules.values():
        parts = [part_of(rule, weights, rank, size) for rank in range(size)]
        ways = 1 if rule.split == "replicated" else size
        merged = [merger.part(rule, part, ways) for merger, part in zip(mergers, parts, strict=True)]
        back = convert.take_apart(rule, convert.gather(rule, merged))
        sent = [torch.zeros(sizes) for sizes in rule.hf.values()]
        for place, (name, whole) in enumerate(zip(rule.hf, sent, strict=True)):
            for rank, (merger, part) in enumerate(zip(mergers, parts, strict=True)):
                piece = merger.piece(rule, part, place, ways)
                rows = rule.share(rank, ways, name).length if rule.split == "rows" else len(piece)
                convert.fill(rule, whole, piece if rule.join == "grouped" else piece[:rows], rank % ways, ways, name)
            assert torch.equal(back[place], whole), f"{name}: a push by parts and an export differ"
            np.testing.assert_allclose(whole.numpy(), want[name], rtol=0, atol=1e-5, err_msg=name)
            num_changed += not torch.equal(whole, weights[name])
    assert num_changed == len(factors) // 2 > 0


def test_untargeted_tensors_are_not_touched_and_exact_ones_stay_in_fp32() -> None:
    merger = Merger({}, 1.0, torch.bfloat16, MergeSums())
    value = torch.randn(4, 3)
    assert torch.equal(merger.part(Rule("a.weight", {"a": (4, 3)}), value, 1), value.bfloat16())
    assert torch.equal(merger.part(Rule("a.weight", {"a": (4, 3)}, exact=True), value, 1), value)


@pytest.mark.parametrize(("scale", "low", "high"), [(1e-5, 0.99, 1.01), (1e-3, 0.3, 1.5), (10.0, 0.0, 3e-3)])
def test_loss_of_a_merge_is_all_of_a_small_update_and_little_of_a_large_one(scale, low, high) -> None:
    """W is in bf16: a change below half a unit of its last place is rounded away."""
    generator = torch.Generator().manual_seed(1)
    rule, rank = Rule("m.weight", {"hf.weight": (64, 48)}, split="rows"), 4
    weight = torch.randn(64, 48, generator=generator).bfloat16()
    a, b = torch.randn(rank, 48, generator=generator), torch.randn(64, rank, generator=generator)
    rules = {f"m{ADAPTER}A.0": Rule("a", {"a": (rank, 48)}), f"m{ADAPTER}B.0": Rule("b", {"b": (64, rank)})}
    held = dict(zip(rules, zip(rules.values(), (a, b), strict=True), strict=True))
    sums = MergeSums()
    Merger(held, scale, torch.bfloat16, sums).piece(rule, weight, 0, 1)
    found = merge_loss([sums.take()])
    added = scale * b.double().numpy() @ a.double().numpy()
    exact = weight.double().numpy() + added
    rounded = torch.tensor(exact).to(torch.bfloat16).double().numpy()
    assert found == pytest.approx(np.linalg.norm(rounded - exact) / np.linalg.norm(added), rel=1e-2)
    assert low <= found <= high
    Merger(held, 0.0, torch.bfloat16, sums).piece(rule, weight, 0, 1)
    assert merge_loss([sums.take()]) == 0.0, "nothing is added"


def test_families_whose_adapters_engines_take_only_merged() -> None:
    """Delta nets, engines that run transformers' own model, and uncompressed queries of latent attention."""
    families_of = (*hf_models.FAMILIES, *hf_models.SPARSE)
    alone = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "smollm3", "deepseek_v2"}
    assert {family for family in families_of if adapter_flags(family) is None} == alone
    assert adapter_flags("qwen3") == {} and adapter_flags("qwen3_moe") == {"exclude_modules": list(WITHOUT_MLP)}
