"""What a checkpoint says of its adapters and their base, against those of the run that resumes."""

import re

import pytest
import torch
from safetensors.torch import save_file

from fusionrl.base.files import sampled_hash
from fusionrl.models.trainable import Adapted, AdapterSpec, adapted_difference, base_identity, saved_in
from tests.models.test_families import shape_of

SHAPE = shape_of("qwen3")
SPEC = AdapterSpec(rank=4, alpha=8, targets=("q_proj", "v_proj"))
SAVED = Adapted(adapters=SPEC, base="org/base", identity="a")


@pytest.mark.parametrize(
    "spec",
    [
        {"dropout": 0.1},
        {"targets": ("q_proj", "k_proj", "v_proj"), "excluded": ("k_proj",)},
        {"alpha": 4.0, "use_rslora": True},  # the same scale
    ],
)
def test_adapters_that_are_the_same(spec):
    run = SAVED.model_copy(update={"adapters": SPEC.model_copy(update=spec), "base": "moved"})
    assert adapted_difference("c", saved_in({"adapted": SAVED.model_dump(mode="json")}), run, SHAPE) is None
    assert adapted_difference("c", saved_in({}), None, SHAPE) is None


@pytest.mark.parametrize(
    ("saved", "spec", "part"),
    [
        (SAVED, None, "checkpoint c: it has adapters and no weights; give --lora-rank 4"),
        (None, {}, "checkpoint c: it has weights and no adapters; leave out --lora-rank"),
        (SAVED, {"rank": 8}, "its adapters have rank 4; give --lora-rank 4, not 8"),
        (SAVED, {"alpha": 16}, "another scale; give --lora-alpha 8"),
        (SAVED, {"use_rslora": True}, "another scale; give --lora-alpha 8 without --lora-use-rslora"),
        (SAVED, {"targets": ("all-linear",)}, "belong to other modules; give --target-modules q_proj v_proj"),
        (
            SAVED.model_copy(update={"identity": "b"}),
            {},
            "belong to the weights in org/base, and those in x are others",
        ),
    ],
)
def test_adapters_that_differ(saved, spec, part):
    run = None if spec is None else Adapted(adapters=SPEC.model_copy(update=spec), base="x", identity="a")
    assert re.search(re.escape(part), adapted_difference("c", saved, run, SHAPE) or "")


def test_the_identity_is_of_the_weights_not_of_their_place(tmp_path):
    """Another one where a twentieth of the weights are others, in place of what was saved."""
    weights = {f"layer-{number}": torch.randn(100, 100) for number in range(20)}
    other = weights | {"layer-7": weights["layer-7"] + 1e-3}
    for name, values in (("one", weights), ("moved", weights), ("other", other)):
        (tmp_path / name).mkdir()
        save_file(values, tmp_path / name / "model.safetensors")
    identities = [base_identity(str(tmp_path / name)) for name in ("one", "moved", "other")]
    assert identities[0] == identities[1] != identities[2]
    assert identities[0] is not None
    sampled = [sampled_hash([tmp_path / name / "model.safetensors"], 64, 64) for name in ("one", "moved", "other")]
    assert sampled[0] == sampled[1] != sampled[2], "4 KB of 800 show it"
