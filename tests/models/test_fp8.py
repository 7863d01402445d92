"""Block-wise fp8: values and scales against a loop in float64 and against transformers, reading it, its bytes."""

import ast
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fusionrl.config.config import Config
from fusionrl.models import convert as fp8
from fusionrl.models.convert import dequantize, held, quantize, quantized
from fusionrl.models.hf_io import HFReader, read_part
from fusionrl.models.quantization import SCALE, BlockFp8, read_quantization
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.plan import Plan, make_plan
from fusionrl.plan.render import render_plan
from fusionrl.weights.checksums import hash_tensor
from fusionrl.weights.gather import buckets
from tests.tiny_model import make_fp8

BLOCKS = [((70, 45), (16, 8)), ((64, 32), (16, 8)), ((5, 3), (128, 128)), ((130, 257), (128, 128)), ((33, 8), (1, 8))]


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Values over many orders of magnitude, so that some are below fp8's normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    return values * torch.exp(3 * torch.randn(rows, columns, generator=generator))


def decode(bits: int) -> float:
    """The value of a float8_e4m3fn by its bits: sign, four of exponent (bias 7), three of mantissa."""
    sign, exponent, mantissa = -1.0 if bits & 128 else 1.0, bits >> 3 & 15, bits & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return math.nan if exponent == 15 and mantissa == 7 else sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


CODES = np.array([decode(bits) for bits in range(256)])
GRID = np.unique(CODES[~np.isnan(CODES)])


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(("sizes", "block"), BLOCKS)
def test_against_a_loop_in_float64(sizes: tuple[int, int], block: tuple[int, int], ue8m0: bool) -> None:
    """Values are the nearest of fp8's 253 numbers, scales those of the blocks' largest, also in blocks cut short."""
    weight = random(*sizes)
    values, scales = quantize(weight, block, ue8m0)
    assert (values.dtype, values.shape, scales.dtype) == (torch.float8_e4m3fn, weight.shape, torch.float32)
    assert scales.shape == (math.ceil(sizes[0] / block[0]), math.ceil(sizes[1] / block[1]))
    back = dequantize(values, scales, block)
    bits = values.view(torch.uint8)
    for i in range(scales.size(0)):
        for j in range(scales.size(1)):
            rows = slice(i * block[0], min((i + 1) * block[0], sizes[0]))
            columns = slice(j * block[1], min((j + 1) * block[1], sizes[1]))
            part, scale = weight[rows, columns].double(), float(scales[i, j])
            wanted = float(part.abs().max()) / 448
            if ue8m0:
                wanted = 2.0 ** math.ceil(math.log2(wanted))
            assert scale == pytest.approx(wanted, rel=0 if ue8m0 else 1e-7)
            exact, decoded = part.numpy() / scale, CODES[bits[rows, columns].numpy()]
            nearest = np.abs(GRID - exact[..., None]).min(-1)
            assert (np.abs(decoded - exact) <= nearest + 1e-5 * np.abs(exact)).all()
            again = back[rows, columns].double().numpy()
            np.testing.assert_allclose(again, decoded * scale, rtol=1e-7)
            error = np.abs(again - part.numpy())
            assert (error <= np.maximum(np.abs(part.numpy()) / 16, scale * 2**-10) * (1 + 1e-6)).all()


def test_against_transformers() -> None:
    """Its conversion multiplies by the reciprocal, so that a value in ten thousand falls on the other side of a tie."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = random(256, 384, seed=1)
    for scale_fmt in (None, "ue8m0"):
        config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt=scale_fmt)
        operation = finegrained.Fp8Quantize(SimpleNamespace(quantization_config=config))
        want = operation.convert({"a.weight": weight})
        values, scales = quantize(weight, (128, 128), ue8m0=scale_fmt == "ue8m0")
        torch.testing.assert_close(scales, want["a.weight_scale_inv"].float(), rtol=1e-6, atol=0)
        same = values.view(torch.uint8) == want["a.weight"].view(torch.uint8)
        assert same.double().mean() > 0.999


def test_zeros_and_values_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros come back as zeros; a NaN or an infinity shows in its block, and in no other."""
    weight = random(8, 8)
    weight[:4, :4], weight[1, 5], weight[6, 2] = 0.0, math.nan, math.inf
    for ue8m0 in (False, True):
        values, scales = quantize(weight, (4, 4), ue8m0)
        back = dequantize(values, scales, (4, 4))
        assert torch.equal(back[:4, :4], torch.zeros(4, 4))
        assert scales[0, 0] == 1.0
        assert back[1, 5].isnan()
        assert back[6, 2].isnan()
        assert back[4:, 4:].isfinite().all()
    whole = quantize(random(64, 48), (8, 8))
    monkeypatch.setattr(fp8, "_CHUNK", 48 * 16)
    for one, other in zip(quantize(random(64, 48), (8, 8)), whole, strict=True):
        assert torch.equal(one.float(), other.float())


# ------------------------------------------------------------------------------------ checkpoints
BLOCK = (16, 24)
LEFT_OUT = "model.layers.1.mlp"


def make_checkpoint(model: Path, folder: Path, **quantization: Any) -> dict[str, torch.Tensor]:
    """One MLP is left in full precision."""
    return make_fp8(model, folder, BLOCK, (LEFT_OUT,), **quantization)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    make_checkpoint(tiny_model, tmp_path / "fp8")
    return tmp_path / "fp8"


def test_what_is_quantised_is_what_the_files_have_scales_of(folder: Path) -> None:
    found = read_quantization(folder)
    assert found is not None
    assert (found.block, found.ue8m0) == (BLOCK, False)
    attention = {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in "qkvo"}
    assert found.names == attention | {f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq', which weights cannot be pushed in; give the bf16 checkpoint"),
        ({"weight_block_size": None}, "quant_method fp8 and weight_block_size None: not block-wise"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'; supported is dynamic"),
        (
            {"modules_to_not_convert": ["self_attn.k_proj"]},
            r"self_attn.k_proj left unquantised, but its files have model.layers.0.self_attn.k_proj.weight_scale_inv",
        ),
    ],
)
def test_another_quantisation_is_refused(
    tiny_model: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_checkpoint(tiny_model, tmp_path / "made", **change)
    with pytest.raises(
        ValueError, match=f"--ref-load .*made: its config.json has a quantization_config with {message}"
    ):
        read_quantization(tmp_path / "made", "--ref-load")


def test_files_without_scales(tiny_model: Path, folder: Path) -> None:
    save_file(load_file(tiny_model / "model.safetensors"), folder / "model.safetensors")
    with pytest.raises(ValueError, match="quant_method fp8, but none of its tensors has scales"):
        read_quantization(folder)
    assert read_quantization(tiny_model) is None


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_reads_its_part_in_full_precision(tiny_model: Path, tmp_path: Path, size: int) -> None:
    """Parts that begin in the middle of a block have that block's scale."""
    from fusionrl.models import convert, families

    whole = make_checkpoint(tiny_model, tmp_path / "fp8")
    shape, reader = read_model_shape(tmp_path / "fp8"), HFReader(tmp_path / "fp8")
    for rule in families.model_rules(shape).values():
        joined = convert.join(rule, [whole[name] for name in rule.hf])
        for rank in range(size):
            part = read_part(reader, rule, rank, size)
            assert torch.equal(part, convert.split(rule, joined, rank, size)), rule.megatron


# ------------------------------------------------------------------------------------ the push
def test_what_the_engines_are_sent(tiny_model: Path, folder: Path) -> None:
    """Their checkpoint's own tensors by name, shape and dtype, and the bytes that the plan says."""
    spec, stored = read_quantization(folder), load_file(folder / "model.safetensors")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    sent = dict(quantized(tensors.items(), spec))
    assert sent.keys() == stored.keys()
    for name, tensor in sent.items():
        assert tensor.shape == stored[name].shape
        assert tensor.dtype == stored[name].dtype or tensor.dtype == torch.bfloat16
    config = Config.from_flat({"hf_checkpoint": str(folder), "rollout_num_gpus": 1, "num_rollout": 1})
    plan = make_plan(config, read_model_shape(folder), device="cuda", num_prompts=1, quantization=spec)
    assert plan.push_bytes == sum(tensor.nbytes for tensor in sent.values())
    assert "11 tensors of them in block-wise fp8" in render_plan(plan, config)
    assert list(quantized(tensors.items(), None)) == list(tensors.items())


def test_weights_travel_with_their_scales() -> None:
    """In one bucket however small it is, as are the two that SGLang joins; a tensor never begins at an odd address."""
    sizes = {"x.q_a_proj.weight": (4, 8), "x.kv_a_proj_with_mqa.weight": (6, 8), "x.o_proj.weight": (3, 3)}
    spec = BlockFp8((4, 4), ue8m0=False, names=frozenset(sizes))
    tensors = [(name, torch.ones(size)) for name, size in sizes.items()]
    found = [[name for name, _ in bucket] for bucket in buckets(quantized(tensors, spec), 40)]
    first, second, third = sizes
    assert found == [[first, first + SCALE, second, second + SCALE], [third], [third + SCALE]]
    together = list(buckets(quantized(tensors[:2], spec), 10**6))
    assert len(together) == 1


def test_checksums_are_those_that_sglang_computes() -> None:
    """Its checker hashes what the stored values and scales are in bf16, by the function that is run here alone."""
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        pytest.skip("sglang is not installed")
    tree = ast.parse(Path(package.origin).parent.joinpath("srt/layers/quantization/fp8_utils.py").read_text())
    name = "block_quant_dequant"
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    space: dict[str, Any] = {"torch": torch, "List": list}
    exec(compile(ast.Module([function], []), "fp8_utils.py", "exec"), space)
    weight = random(256, 384, seed=2).bfloat16()
    spec = BlockFp8((128, 128), ue8m0=False, names=frozenset({"a.weight"}))
    sent = dict(quantized([("a.weight", weight)], spec))
    theirs = space[name](sent["a.weight"], sent["a.weight" + SCALE], [128, 128], torch.bfloat16)
    ((_, ours),) = held([("a.weight", weight)], spec)
    assert ours.dtype == torch.bfloat16
    assert hash_tensor(ours) == hash_tensor(theirs)


def test_engines_in_fp8_need_a_gpu_and_bf16(folder: Path) -> None:
    shape, spec = read_model_shape(folder), read_quantization(folder)

    def plan(device: Any, **values: str) -> Plan:
        config = Config.from_flat({"hf_checkpoint": str(folder)} | values)
        return make_plan(config, shape, device=device, num_prompts=0, quantization=spec)

    with pytest.raises(ValueError, match="its weights are in fp8, .* this would be on cpu with --rollout-dtype fp32"):
        plan("cpu")
    with pytest.raises(ValueError, match="this would be on cuda with --rollout-dtype fp32"):
        plan("cuda", rollout_dtype="fp32")
    assert plan("cpu", mode="sft").quantization == spec
