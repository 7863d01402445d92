"""The memory estimate of engines that only read: a reward model's and a teacher's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.models.shape import shape_from_hf_config
from fusionrl.plan.devices import GIB, Machine
from fusionrl.plan.memory.bars import ENGINE_PROCESS, GPU_PROCESS
from fusionrl.plan.memory.report import MemoryReport
from fusionrl.plan.plan import make_plan
from tests.plan.shapes import SMALL

# 32 B parameters: 60 GiB in bf16.
LARGE = SMALL | {
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def folder(path: Path, raw: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    return str(path)


def report(memory: float, device: Any = "cuda", policy: dict[str, Any] = SMALL, **values: Any) -> MemoryReport:
    values = {"rollout_batch_size": 64, "num_rollout": 3, "rollout_max_response_len": 1024} | values
    kind = {"device_memory": memory * GIB} if device == "cuda" else {"host_memory": memory * GIB}
    made = make_plan(
        Config.from_flat(values),
        shape_from_hf_config(policy),
        device=device,
        num_prompts=9,
        machine=Machine(device, "a box", **kind),
    )
    return made.memory


def teacher(path: str, **sizes: int) -> dict[str, Any]:
    return {"use_opd": True, "opd_type": "sglang", "opd_teacher_load": path} | sizes


def test_a_teacher_has_devices_of_its_own(tmp_path: Path) -> None:
    path = folder(tmp_path / "teacher", LARGE)
    without = report(80)
    made = report(80, **teacher(path, opd_teacher_num_gpus=2, opd_teacher_num_gpus_per_engine=2))
    (scorer,) = made.scorers
    count = shape_from_hf_config(LARGE).num_parameters
    assert scorer.engine.weights == count  # of 2 bytes each, on 2 devices
    (bar,) = (bar for bar in made.device_bars if bar.name == "teacher")
    assert dict(bar.parts)["weights"] == count and bar.total < 80 * GIB
    assert made.fits and made.worst == without.worst, "an engine takes what is there"
    assert any(line.startswith("a device of an engine of the teacher: weights ") for line in made.lines())
    processes = [dict(one.host_bars[0].parts)["processes"] for one in (without, made)]
    assert processes[1] - processes[0] == 2 * GPU_PROCESS


def test_a_teacher_that_does_not_fit_is_said_with_its_cure(tmp_path: Path) -> None:
    path = folder(tmp_path / "teacher", LARGE)
    made = report(60, **teacher(path))
    assert made.fits is False
    verdict = made.verdict()
    assert "DOES NOT FIT: the teacher's engine's KV cache has room for 0 tokens" in verdict
    change = "--opd-teacher-num-gpus-per-engine 2 --opd-teacher-num-gpus 2"
    assert f"it would with {change}" in verdict
    assert report(60, **teacher(path, opd_teacher_num_gpus=2, opd_teacher_num_gpus_per_engine=2)).fits
    # Devices that are there are not asked for again.
    assert report(60, **teacher(path, opd_teacher_num_gpus=4)).change.startswith(  # type: ignore[union-attr]
        "--opd-teacher-num-gpus-per-engine 2 ("
    )
    # The user's own fields of SGLang's are its engine's.
    assert report(80, **teacher(path)).fits
    lean = report(80, **teacher(path), opd_teacher_server_args={"mem_fraction_static": 0.7})
    assert "of 0.70 of the device" in lean.verdict()


def test_both_engines_and_teacher_are_cured(tmp_path: Path) -> None:
    path = folder(tmp_path / "teacher", LARGE)
    trained = {"actor_num_nodes": 8, "actor_num_gpus_per_node": 8, "tensor_model_parallel_size": 8}
    made = report(60, policy=LARGE, rollout_num_gpus=8, **trained, **teacher(path))
    assert str(made.change).startswith(
        "--rollout-num-gpus-per-engine 2 --opd-teacher-num-gpus-per-engine 2 --opd-teacher-num-gpus 2"
    ), made.verdict()


def test_on_a_cpu_it_is_in_its_nodes_memory(tmp_path: Path) -> None:
    path = folder(tmp_path / "teacher", SMALL)
    without, made = report(23, "cpu"), report(23, "cpu", **teacher(path))
    bars = [dict(one.host_bars[0].parts) for one in (without, made)]
    weights = 4 * shape_from_hf_config(SMALL).num_parameters
    assert bars[1]["reward model's and teacher's weights"] == weights
    assert bars[1]["KV caches"] == 2 * bars[0]["KV caches"] > 0
    assert bars[1]["processes"] - bars[0]["processes"] == ENGINE_PROCESS
    large = report(23, "cpu", **teacher(folder(tmp_path / "large", LARGE)))
    assert large.fits is False and "DOES NOT FIT" in large.verdict()


def test_a_reward_model_has_a_score_in_place_of_the_output_layer(tmp_path: Path) -> None:
    rm = folder(tmp_path / "rm", SMALL | {"architectures": ["Qwen3ForSequenceClassification"]})
    made = report(23, "cpu", rm_type="reward_model", rm_model=rm)
    (scorer,) = made.scorers
    assert scorer.engine.weights == 4 * (shape_from_hf_config(SMALL).num_parameters - 512 * 64 + 64)
    assert any(line.startswith("a device of an engine of the reward model: ") for line in made.lines())


def test_an_fp8_teacher_counts_as_fp8(tmp_path: Path) -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    plain = report(80, **teacher(folder(tmp_path / "bf16", LARGE)))
    half = report(80, **teacher(folder(tmp_path / "fp8", LARGE | fp8)))
    sizes = [one.scorers[0].engine.weights for one in (plain, half)]  # type: ignore[union-attr]
    assert 0.5 < sizes[1] / sizes[0] < 0.56  # the embeddings stay in bf16


@pytest.mark.parametrize(("raw", "reason"), [({"model_type": "gemma2"}, "gemma2"), (None, "config.json is missing")])
def test_a_model_that_only_sglang_knows(raw: dict[str, Any] | None, reason: str, tmp_path: Path) -> None:
    path = str(tmp_path / "elsewhere") if raw is None else folder(tmp_path / "rm", raw)
    made = report(80, rm_type="reward_model", rm_model=path)
    assert made.fits and made.scorers[0].engine is None
    (line,) = (line for line in made.lines() if line.startswith("the reward model: not estimated ("))
    assert reason in line and f"--rm-model {path}" in line
