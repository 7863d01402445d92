"""Norms and rotary embeddings as single functions: values and gradients, against torch's and Megatron's formulas."""

from types import ModuleType, SimpleNamespace

import pytest
import torch

from fusionrl.cpu import row_functions
from fusionrl.cpu.row_functions import rms_norm


def test_a_row_of_zeros_has_a_finite_gradient() -> None:
    hidden = torch.zeros(2, 4, requires_grad=True)
    rms_norm(hidden, torch.ones(4), 1e-5).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def _megatrons(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """The formula, `freqs` [T, 1, r]."""
    turned, kept = t[..., : freqs.size(-1)], t[..., freqs.size(-1) :]
    first, second = turned.chunk(2, -1)
    turned = turned * freqs.cos() + torch.cat((-second, first), -1) * freqs.sin()
    return torch.cat((turned, kept), -1)


def _patched() -> tuple[ModuleType, list[object]]:
    calls: list[object] = []
    module = ModuleType("attention")
    module.apply_rotary_pos_emb = lambda *args, **more: calls.append(more)  # type: ignore[attr-defined]
    row_functions.patch_rotary(module)
    return module, calls


CONFIG = {"rotary_interleaved": False, "multi_latent_attention": False, "apply_rope_fusion": False}
OFFSETS = torch.tensor([0, 5])
ALONE, TWO = SimpleNamespace(size=lambda: 1), SimpleNamespace(size=lambda: 2)


def test_sequences_begin_at_the_first_angle_and_angles_are_those_of_the_batch() -> None:
    module, calls = _patched()
    apply, config = module.apply_rotary_pos_emb, SimpleNamespace(**CONFIG)
    for lengths in ([3, 2], [1, 4]):  # the second batch must not get the first one's
        half = torch.randn(max(lengths), 1, 1, 4)
        freqs, offsets = torch.cat((half, half), -1), torch.tensor([0, lengths[0], 5], dtype=torch.int32)
        packed = torch.cat([freqs[:length, 0] for length in lengths])
        for num_heads in (3, 1):
            values = torch.randn(5, num_heads, 8)
            torch.testing.assert_close(apply(values, freqs, config, offsets, 1.0, ALONE), _megatrons(values, packed))
    assert not calls


def test_shared_tokens_have_an_angle_each_and_another_scale_others() -> None:
    module, _ = _patched()
    half = torch.randn(5, 1, 1, 4)
    freqs, values = torch.cat((half, half), -1), torch.randn(5, 2, 8)
    once, twice = (
        module.apply_rotary_pos_emb(values, freqs, SimpleNamespace(**CONFIG), OFFSETS, scale, ALONE)
        for scale in (1.0, 2.0)
    )
    torch.testing.assert_close(once, _megatrons(values, freqs[:, 0]))
    torch.testing.assert_close(twice, 2 * once)


@pytest.mark.parametrize(
    ("changes", "offsets", "group", "more"),
    [
        ({"rotary_interleaved": True}, OFFSETS, ALONE, {}),
        ({"multi_latent_attention": True}, OFFSETS, ALONE, {}),
        ({"apply_rope_fusion": True}, OFFSETS, ALONE, {}),
        ({}, OFFSETS, TWO, {}),
        ({}, OFFSETS, None, {}),
        ({}, None, ALONE, {}),
        ({}, OFFSETS, ALONE, {"inverse": True}),  # of a later release
        ({"kernels": False}, OFFSETS, ALONE, {}),  # a machine without a compiler
    ],
)
def test_other_cases_are_megatrons(
    changes: dict[str, bool],
    offsets: torch.Tensor | None,
    group: object,
    more: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, calls = _patched()
    config = SimpleNamespace(**CONFIG | changes)
    monkeypatch.setattr(row_functions.kernels, "loaded", lambda: changes.get("kernels", True))
    module.apply_rotary_pos_emb(torch.zeros(5, 1, 8), torch.zeros(5, 1, 1, 8), config, offsets, 1.0, group, **more)
    assert calls == [more]
