"""`fusionrl plan --cluster`: a plan for devices elsewhere, from a config.json alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusionrl import cli
from fusionrl.config.config import Config
from fusionrl.config.plan_flags import imbalance_of, take_plan_flags
from fusionrl.plan.cluster import Cluster, on_cluster
from fusionrl.plan.devices import GIB, KINDS

FILE = Path(__file__).parent / "qwen3_30b_a3b.json"
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "check.md"
# The example of docs/guides/check.md.
(_TEXT,) = re.findall(r"plan --cluster 8x8xh200 --hf-checkpoint config\.json (.*?)\n```", PAGE.read_text(), re.S)
EXAMPLE = _TEXT.replace("\\\n", " ").split()


def command(*flags: str, cluster: str = "8x8xh200", file: Path = FILE) -> int:
    return cli.main(["plan", "--cluster", cluster, "--hf-checkpoint", str(file), *flags])


def test_qwen3_30b_for_64_h200_from_its_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No weights, tokenizer, data or GPU are here; a folder with the config.json does as well."""
    assert command(*EXAMPLE) == 0
    text = capsys.readouterr().out
    assert "64 ranks = TP 4 x CP 1 x PP 1 x DP 16 (EP 8)" in text
    assert "32 x TP 2" in text
    assert "30532.12 M parameters" in text  # as the model's card says, 30.5 B
    assert "verdict    fits: " in text
    assert "of 141.0 GiB (h200; worst: " in text
    assert "tokens an engine (48.0 KiB each)" in text
    assert "not checked: tokenizer, weights" in text
    (tmp_path / "config.json").write_text(FILE.read_text())
    assert command(*EXAMPLE, file=tmp_path) == 0
    assert capsys.readouterr().out == text


def test_what_does_not_fit_is_said_with_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*EXAMPLE, cluster="8x8xl40s") == 0
    verdict = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("verdict"))
    assert "DOES NOT FIT" in verdict
    assert "it would with --" in verdict


def test_errors_of_layout_and_flags_are_still_found(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tensor-model-parallel-size", "3", "--rollout-top-k", "5", "--lr", "fast"]
    assert command("--colocate", "--rollout-batch-size", "8", *flags) == 2
    errors = capsys.readouterr().err
    assert "tp 3" in errors
    assert "--rollout-top-k" in errors
    assert "--lr fast" in errors
    assert "prompt-data" not in errors


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("8x8", "give NODESxGPUSxKIND"),
        ("0x8xh100", "give NODESxGPUSxKIND"),
        ("8x8xh2000", "did you mean h200?"),
        ("8x8xtpu", "known are a100-40g"),
    ],
)
def test_a_cluster_that_is_none(text: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*EXAMPLE, cluster=text) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: --cluster {text}: ")
    assert part in error


def test_a_file_that_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, part in (("{", "not valid JSON"), ("[]", "not a JSON object"), ('{"model_type": "bert"}', "'bert'")):
        (tmp_path / "config.json").write_text(content)
        assert command(*EXAMPLE, file=tmp_path / "config.json") == 2
        assert part in capsys.readouterr().err
    assert command(*EXAMPLE, file=tmp_path / "none.json") == 2
    assert "config.json is missing" in capsys.readouterr().err


def test_train_refuses_the_flags_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--cluster", "1x8xh100"), ("--router-imbalance", "2")):
        assert cli.main(["train", flag, value, "--hf-checkpoint", str(FILE)]) == 2
        assert f"error: {flag}: it belongs to `fusionrl plan`" in capsys.readouterr().err


def test_a_plan_larger_than_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rollout-batch-size", "8", "--actor-num-nodes", "1", "--rollout-num-gpus", "4"]
    assert command(*flags, cluster="1x8xh100") == 2
    assert "the plan takes 12 devices of 8" in capsys.readouterr().err


def placed(text: str, **values: Any) -> tuple[int, int, int | None]:
    cluster = on_cluster(Config.from_flat(values), Cluster.parse(text)).cluster
    assert (cluster.device, cluster.num_gpus_per_node) == ("cuda", int(text.split("x")[1]))
    return cluster.actor_num_nodes, cluster.actor_num_gpus_per_node, cluster.rollout_num_gpus


def test_sizes_follow_from_the_cluster() -> None:
    assert placed("8x8xh200", colocate=True) == (8, 8, None)
    assert placed("8x8xh200", mode="sft") == (8, 8, None)
    assert placed("8x8xh200", rollout_num_gpus=32) == (4, 8, 32)
    assert placed("1x8xh200", rollout_num_gpus=3) == (1, 5, 3)
    assert placed("8x8xh200", actor_num_nodes=2) == (2, 8, 48)
    assert placed("2x4xa10", mode="eval") == (1, 1, 8)
    critic = {"advantage_estimator": "ppo", "critic_num_gpus": 8}
    assert placed("8x8xh200", rollout_num_gpus=32, **critic) == (3, 8, 32)
    with pytest.raises(ValueError, match="say how its 64 GPUs are divided"):
        placed("8x8xh200")
    with pytest.raises(ValueError, match="--device cpu contradicts --cluster"):
        placed("8x8xh200", colocate=True, device="cpu")
    with pytest.raises(ValueError, match="--num-gpus-per-node 4 contradicts --cluster"):
        placed("8x8xh200", colocate=True, num_gpus_per_node=4)


def test_plan_flags_are_taken_out_of_a_command_line() -> None:
    values, rest, errors = take_plan_flags(
        ["--lr", "1", "--cluster=2x2xl4", "--seed", "3", "--router-imbalance", "1.5"]
    )
    assert values == {"--cluster": "2x2xl4", "--router-imbalance": "1.5"}
    assert rest == ["--lr", "1", "--seed", "3"]
    assert errors == []
    assert take_plan_flags(["--cluster", "--lr"])[2] == ["--cluster: it needs a value, NODESxGPUSxKIND"]
    assert imbalance_of(values) == 1.5
    for text in ("0.5", "much", "inf"):
        with pytest.raises(ValueError, match=f"--router-imbalance {text}"):
            imbalance_of({"--router-imbalance": text})


def test_the_imbalance_of_experts_is_felt(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for flags in ([], ["--router-imbalance", "1.5"]):
        assert command(*EXAMPLE, *flags) == 0
        verdict = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("verdict"))
        peaks.append(float(verdict.split("fits: ")[1].split(" ")[0]))
    assert peaks[1] > peaks[0] * 1.05


def test_the_page_has_every_kind_of_device() -> None:
    rows = [
        f"| `{name}` | {kind.memory / GIB:g} | {kind.bandwidth / 1e12:g} | {kind.peak / 1e12:g} | {kind.source} |"
        for name, kind in KINDS.items()
    ]
    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8")


def test_what_stands_on_the_clusters_disks_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--advantage-estimator", "ppo", "--critic-load", "/models/critic", "--critic-num-gpus", "8"]
    assert command(*EXAMPLE, *flags, "--actor-num-nodes", "7") == 0
    text = capsys.readouterr().out
    assert "--critic-load (taken for a model of --hf-checkpoint's shape)" in text
    assert "critic, stage 0, backward" in text


def test_an_fp8_checkpoint_counts_as_fp8_in_the_engines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Half of the projections' bytes, and a scale of 4 bytes for each block; embeddings stay in bf16."""
    raw = json.loads(FILE.read_text())
    found = {}
    for name, quantization in {
        "bf16": None,
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "attention in bf16": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["self_attn"],
        },
    }.items():
        (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
        assert command(*EXAMPLE, file=tmp_path / "config.json") == 0
        (line,) = re.findall(r"weights    ([\d.]+) MB", capsys.readouterr().out)
        found[name] = float(line)
    rest = 2 * 151936 * 2048 + 48 * 128 * 2048 + 48 * (2 * 2048 + 2 * 128) + 2048  # embeddings, routers, norms
    projections = 30532122624 - rest
    assert found["fp8"] == pytest.approx((2 * rest + projections + 4 * projections / 128**2) / 1e6, rel=1e-5)
    assert found["bf16"] == pytest.approx(2 * (rest + projections) / 1e6, rel=1e-5)
    attention = 48 * 2048 * 128 * (32 + 4 + 4 + 32)
    assert found["attention in bf16"] - found["fp8"] == pytest.approx(attention * (1 - 4 / 128**2) / 1e6, rel=1e-3)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "awq"}}))
    assert command(*EXAMPLE, file=tmp_path / "config.json") == 2
    assert "quant_method 'awq'" in capsys.readouterr().err


def test_epochs_of_data_that_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--mode", "sft", "--rollout-batch-size", "64", "--num-epoch", "2", cluster="8x8xh200") == 0
    assert "number of rollout steps not given" in capsys.readouterr().out
