"""Kinds of layers: what a shape makes of them, shapes that are saved, and the files that may ask for one by name."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal

import pytest
from pydantic import ValidationError

import fusionrl
from fusionrl.models import kinds
from fusionrl.models.kinds import Attention, Delta, Dense, Experts, Full, Kind, Latent, Mlp, RankSizes, Window
from fusionrl.models.rules import LLAMA
from fusionrl.models.shape import ModelShape, shape_difference
from fusionrl.plan.layout import TrainerLayout, model_errors
from tests.models.test_families import shape_of

PACKAGE = Path(fusionrl.__file__).parent
KINDS = {kind for name in kinds.__all__ if (kind := getattr(kinds, name)) not in (Attention, Kind, Mlp, RankSizes)}
# The shape and the families; Megatron's modules of kinds; routing replay, which only mixtures have; what was tried of
# equal bits.
MAY_NAME_A_KIND = {
    "models/shape.py",
    *(f"models/families/{file}.py" for file in ("llama", "mixtures", "hybrids")),
    *("trainer/layers.py", "trainer/layer_traits.py", "trainer/gated_delta.py"),
    *("trainer/routing.py", "trainer/policy.py", "buffer/collect.py"),
    *("plan/repeatable.py", "checks/bitwise.py"),
}


def test_no_other_file_asks_for_a_kind_by_name() -> None:
    """A new kind is one object: what another file wants to know of a layer, the kind answers."""
    names = "|".join(kind.__name__ for kind in KINDS)
    values = "|".join(default for kind in KINDS if isinstance(default := kind.model_fields["kind"].default, str))
    asks = re.compile(
        rf"^from fusionrl\.models\.kinds\S* import .*\b({names})\b|\bkinds\.({names})\b"
        rf"|\bshape\.(mixture|mla|moe)\b|\.kind\b.* (==|!=|in) .*\"({values})\"|\"({values})\" (==|!=|in) ",
        re.MULTILINE,
    )
    files = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    files = {name: re.sub(r"\bimport \([^)]*\)", _on_one_line, text) for name, text in files.items()}
    found = {name for name, text in files.items() if asks.search(text) and not name.startswith("models/kinds/")}
    assert found == MAY_NAME_A_KIND


def _on_one_line(names: re.Match[str]) -> str:
    return " ".join(names[0].split())


def test_every_kind_answers_for_itself() -> None:
    """What the base classes leave open, of each kind that a built-in family has."""
    assert {Full, Latent, Delta, Dense, Experts} <= KINDS
    for kind in KINDS:
        base, names = (Attention, []) if issubclass(kind, Attention) else (Mlp, ["widest"])
        for name in ("rules", "divided", "kept_bytes", *names):
            assert getattr(kind, name) is not getattr(base, name), (kind, name)
        assert kind.fit is Kind.fit, "its modules are in the table of `trainer/layers.py`"


def test_the_guide_has_everything_that_a_kind_answers() -> None:
    page = (PACKAGE.parent / "docs" / "guides" / "own-model.md").read_text(encoding="utf-8")
    for base in (Kind, Attention, Mlp):
        names = {name for name in {*vars(base), *base.__annotations__} if not name.startswith(("_", "model_"))}
        assert [name for name in sorted(names - {"classes"}) if not re.search(rf"`{name}\b", page)] == []


def test_one_kind_is_of_all_layers() -> None:
    assert shape_of("llama").attention == (Full(), Full())
    assert shape_of("llama").mlp == (Dense(), Dense())
    assert shape_of("smollm3").attention == (Full(), Full(rope=False))
    latent = shape_of("deepseek_v3")
    assert [kind.kind for kind in latent.kinds] == ["latent", "dense", "experts"]
    assert latent.expert_layers == (1,) and not latent.may_share_prompts


def test_kinds_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ValidationError, match="kinds of 3 and 2 of 2 layers"):
        ModelShape(**shape_of("llama").model_dump() | {"attention": [Full()] * 3})


def test_windows_and_sinks() -> None:
    """Hugging Face's number counts the token itself, Megatron's does not; a softmax has one more term for a sink."""
    shape = shape_of("gemma3_text")
    window, full = shape.attention
    assert window == Window(size=8, rope_theta=10000.0) and full == Full()
    assert (window.window, window.rotary_base(shape)) == (8, 10000.0)
    assert (full.window, full.rotary_base(shape)) == (None, 1e6)
    assert shape.kind_fields == {"softmax_scale": 24**-0.5, "window_size": (7, 0), "window_attn_skip_freq": [1, 0]}
    assert shape.may_share_prompts
    assert model_errors(TrainerLayout(2, cp=2), shape, {}) == [
        "--context-parallel-size 2: layers of the kind window cannot be divided so; give 1"
    ]
    kind = Window(size=8, sinks=True, output_bias=True)
    sinking = shape_of("llama").model_copy(update={"attention": (kind, Full(sinks=True, output_bias=True))})
    assert sinking.kind_fields["softmax_type"] == "learnable" and sinking.kind_fields["add_bias_linear"]
    rules = {rule.megatron: rule for rule in kind.rules(sinking, 0, LLAMA)}
    sinks = rules["decoder.layers.0.self_attention.core_attention.softmax_offset"]
    assert (sinks.hf, sinks.split) == ({"model.layers.0.self_attn.sinks": (4,)}, "rows")
    bias = rules["decoder.layers.0.self_attention.linear_proj.bias"]
    assert (bias.hf, bias.split) == ({"model.layers.0.self_attn.o_proj.bias": (32,)}, "replicated")
    with pytest.raises(ValidationError, match="windows of different sizes"):
        ModelShape(**shape.model_dump() | {"attention": [Window(size=8), Window(size=9)]})


def test_layers_that_scale_their_scores_otherwise() -> None:
    """YaRN makes scores larger, in OLMo 3 those of layers without a window; Megatron has one scale for all layers."""
    factor = 0.1 * math.log(8.0) + 1.0
    yarn: dict[str, object] = {"rope_type": "yarn", "factor": 8.0, "attention_factor": factor, "rope_theta": 500000.0}
    yarn |= {"original_max_position_embeddings": 32}
    rope = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}
    shape = shape_of("olmo3", rope_parameters=rope)
    scales = [kind.scale(shape) * 8**0.5 for kind in shape.attention if isinstance(kind, Full | Window)]
    assert scales == pytest.approx([1.0, factor**2])
    assert "softmax_scale" not in shape.kind_fields
    qwen = shape_of("qwen3", rope_parameters=yarn)
    assert qwen.kind_fields == {"softmax_scale": pytest.approx(factor**2 / 4.0)}


@pytest.mark.parametrize("family", ["llama", "smollm3", "qwen2_moe", "deepseek_v3", "gemma3_text"])
def test_a_saved_shape_is_read_again(family: str) -> None:
    shape = shape_of(family)
    saved = shape.model_dump(mode="json")
    assert ModelShape(**saved) == shape
    assert hash(ModelShape(**saved)) == hash(shape)
    assert shape_difference("here", saved, shape) is None
    other = shape.model_copy(update={"attention": (Full(rope=False),) * shape.num_layers})
    assert "its model has attention of layer 0 {'kind': '" in str(shape_difference("here", saved, other))


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "deepseek_v2"])
def test_a_shape_that_an_earlier_version_saved_is_read(family: str) -> None:
    """One with `moe` and `mla` for all layers."""
    shape = shape_of(family)
    saved = shape.model_dump(mode="json")
    attention, mlp = saved.pop("attention")[0], saved.pop("mlp")[-1]
    for kind in (attention, mlp):
        name = kind.pop("kind")
        if name == "latent":
            saved["mla"] = kind
        if name == "experts":
            saved["moe"] = kind | {"layers": list(shape.expert_layers)}
    assert shape_difference("here", {"mla": None, "moe": None} | saved, shape) is None


class Skipped(Attention):
    """A kind of a plug-in's."""

    kind: Literal["skipped"] = "skipped"
    every: int = 2


def test_a_kind_of_ones_own_is_saved_and_read() -> None:
    shape = shape_of("llama").model_copy(update={"attention": (Full(), Skipped(every=3))})
    assert ModelShape(**shape.model_dump(mode="json")).attention == (Full(), Skipped(every=3))
    with pytest.raises(KeyError, match="unheard"):
        ModelShape(**shape.model_dump() | {"mlp": [{"kind": "unheard"}] * 2})


def test_a_kind_needs_a_name_of_its_own() -> None:
    with pytest.raises(ValueError, match="Narrow: its kind 'full' is that of Full; give it one of its own"):

        class Narrow(Full):
            size: int = 1

    # Python still lists the class; a saved shape is not read as one.
    assert type(ModelShape(**shape_of("llama").model_dump()).attention[0]) is Full


def test_a_mixture_and_latent_attention_say_what_they_need() -> None:
    shape = shape_of("deepseek_v2")
    latent, _, experts = shape.kinds
    assert isinstance(latent, Latent) and isinstance(experts, Experts)
    assert latent.needs_sequence_parallel and experts.needs_sequence_parallel
    assert latent.engine_tensors() == {}, "queries are not compressed"
