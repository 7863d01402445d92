"""`fusionrl plan --cluster`: a plan for devices elsewhere, from a config.json alone."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl import cli
from fusionrl.config.config import Config
from fusionrl.config.parser import read_args
from fusionrl.plan.cluster import Cluster, on_cluster
from fusionrl.plan.devices import GIB, KINDS

FILE = Path(__file__).parent / "qwen3_30b_a3b.json"
FEW_LAYERS = json.loads(FILE.read_text()) | {"num_hidden_layers": 4}
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "check.md"
(_TEXT,) = re.findall(r"plan --cluster 8x8xh200 --hf-checkpoint config\.json (.*?)\n```", PAGE.read_text(), re.S)
EXAMPLE = _TEXT.replace("\\\n", " ").split()
Planned = Callable[..., str]


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Planned:
    """planned(*flags, cluster=…, raw=…, code=…) -> what the command prints; `raw` is the content of config.json."""

    def run(*flags: str, cluster: str = "8x8xh200", raw: Any = FEW_LAYERS, code: int = 0) -> str:
        file = tmp_path / "config.json"
        file.write_text(raw if isinstance(raw, str) else json.dumps(raw))
        assert cli.main(["plan", "--cluster", cluster, "--hf-checkpoint", str(file), *flags]) == code
        output = capsys.readouterr()
        return output.err if code else output.out

    return run


def test_qwen3_30b_for_64_h200_from_its_config(planned: Planned) -> None:
    """No weights, tokenizer, data or GPU are here."""
    text = planned(*EXAMPLE, raw=FILE.read_text())
    for part in (
        "64 ranks = TP 4 x CP 1 x PP 1 x DP 16 (EP 8)",
        "32 x TP 2",
        "30532.12 M parameters",  # as the model's card says, 30.5 B
        "verdict    fits: ",
        "of 141.0 GiB (h200; worst: ",
        "tokens an engine (48.0 KiB each)",
        "not checked: tokenizer, weights",
    ):
        assert part in text
    text = planned(*EXAMPLE, cluster="8x8xl40s", raw=FILE.read_text())
    assert re.search("verdict .*DOES NOT FIT.*it would with --", text)


def test_errors_of_layout_and_flags_are_still_found(planned: Planned) -> None:
    flags = ["--tensor-model-parallel-size", "3", "--rollout-top-k", "5", "--lr", "fast"]
    errors = planned("--colocate", "--rollout-batch-size", "8", *flags, code=2)
    assert all(part in errors for part in ("tp 3", "--rollout-top-k", "--lr fast")) and "prompt-data" not in errors
    errors = planned("--colocate", "--rm-type", "math", "--custom-rm-path", "my.py:reward", code=2)
    assert "--rm-type and --custom-rm-path exclude each other" in errors
    flags = ["--rollout-batch-size", "8", "--actor-num-nodes", "1", "--rollout-num-gpus", "4"]
    assert "the plan takes 12 devices of 8" in planned(*flags, cluster="1x8xh100", code=2)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        *((text, "give NODESxGPUSxKIND") for text in ("8x8", "0x8xh100")),
        ("8x8xh2000", "did you mean h200?"),
        ("8x8xtpu", "known are a100-40g"),
    ],
)
def test_a_cluster_that_is_none(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=f"--cluster {text}: .*{re.escape(part)}"):
        Cluster.parse(text)


def test_a_file_that_is_no_config(planned: Planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, part in (("{", "not valid JSON"), ("[]", "not a JSON object"), ('{"model_type": "bert"}', "'bert'")):
        assert part in planned(*EXAMPLE, raw=content, code=2)
    text = planned(*EXAMPLE)
    for path, code in ((tmp_path, 0), (tmp_path / "none.json", 2)):  # a folder with the file does as well
        assert cli.main(["plan", "--cluster", "8x8xh200", "--hf-checkpoint", str(path), *EXAMPLE]) == code
        output = capsys.readouterr()
        assert output.out == text if code == 0 else "config.json is missing" in output.err


def test_train_refuses_the_flags_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--cluster", "1x8xh100"), ("--router-imbalance", "2")):
        assert cli.main(["train", flag, value, "--hf-checkpoint", str(FILE)]) == 2
        assert f"error: {flag}: it belongs to `fusionrl plan`" in capsys.readouterr().err


def placed(text: str, **values: Any) -> tuple[int, int, int | None]:
    cluster = on_cluster(Config.from_flat(values), Cluster.parse(text)).cluster
    assert (cluster.device, cluster.num_gpus_per_node) == ("cuda", int(text.split("x")[1]))
    return cluster.actor_num_nodes, cluster.actor_num_gpus_per_node, cluster.rollout_num_gpus


def test_sizes_follow_from_the_cluster() -> None:
    critic = {"advantage_estimator": "ppo", "critic_num_gpus": 8}
    assert placed("8x8xh200", colocate=True) == placed("8x8xh200", mode="sft") == (8, 8, None)
    assert placed("8x8xh200", rollout_num_gpus=32) == (4, 8, 32)
    assert placed("1x8xh200", rollout_num_gpus=3) == (1, 5, 3)
    assert placed("8x8xh200", actor_num_nodes=2) == (2, 8, 48)
    assert placed("2x4xa10", mode="eval") == (1, 1, 8)
    assert placed("8x8xh200", rollout_num_gpus=32, **critic) == (3, 8, 32)
    for values, message in (
        ({}, "say how its 64 GPUs are divided"),
        ({"colocate": True, "device": "cpu"}, "--device cpu contradicts --cluster"),
        ({"colocate": True, "num_gpus_per_node": 4}, "--num-gpus-per-node 4 contradicts --cluster"),
    ):
        with pytest.raises(ValueError, match=message):
            placed("8x8xh200", **values)


def test_mistakes_of_the_flags_of_plan() -> None:
    assert read_args(["--cluster", "--lr", "1"])[1] == ["--cluster: it needs a value"]
    for text in ("0.5", "much", "inf"):
        (error,) = read_args(["--router-imbalance", text])[1]
        assert error.startswith(f"--router-imbalance {text}: ")


def test_the_page_has_every_kind_of_device() -> None:
    rows = [
        f"| `{name}` | {kind.memory / GIB:g} | {kind.bandwidth / 1e12:g} | {kind.peak / 1e12:g} | {kind.source} |"
        for name, kind in KINDS.items()
    ]
    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8")


def test_what_stands_on_the_clusters_disks_is_listed(planned: Planned) -> None:
    flags = ["--advantage-estimator", "ppo", "--critic-load", "/models/critic", "--critic-num-gpus", "8"]
    text = planned(*EXAMPLE, *flags, "--actor-num-nodes", "7")
    assert "--critic-load (taken for a model of --hf-checkpoint's shape)" in text
    assert "critic, stage 0, backward" in text
    epochs = ("--mode", "sft", "--rollout-batch-size", "64", "--num-epoch", "2")
    assert "number of rollout steps not given" in planned(*epochs)


def test_an_fp8_checkpoint_counts_as_fp8_in_the_engines(planned: Planned) -> None:
    """Half of the projections' bytes, and a scale of 4 bytes for each block; embeddings stay in bf16."""

    def pushed(**quantization: object) -> float:
        text = planned(*EXAMPLE, raw=FEW_LAYERS | {"quantization_config": quantization or None})
        return float(re.findall(r"weights    ([\d.]+) MB", text)[0]) * 1e6

    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    attention = 4 * 2048 * 128 * (32 + 4 + 4 + 32)
    projections = attention + 4 * 128 * 3 * 2048 * 768
    assert pushed() - pushed(**fp8) == pytest.approx(projections * (1 - 4 / 128**2), rel=1e-4)
    kept = pushed(**fp8, modules_to_not_convert=["self_attn"])
    assert kept - pushed(**fp8) == pytest.approx(attention * (1 - 4 / 128**2), rel=1e-3)
    awq = FEW_LAYERS | {"quantization_config": {"quant_method": "awq"}}
    assert "quant_method 'awq'" in planned(*EXAMPLE, raw=awq, code=2)
