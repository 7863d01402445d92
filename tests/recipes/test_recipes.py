"""The launch recipes: each script's command is recorded, not run, and planned for the cluster that the script states.

`configs/` has the sizes of the published config.json files; `_name_or_path` names the repository on the Hub.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fusionrl import cli
from fusionrl.config.parser import read_args
from fusionrl.models.shape import shape_from_hf_config

REPO = Path(__file__).parents[2]
FOLDER, CONFIGS = REPO / "scripts" / "models", Path(__file__).parent / "configs"
# Recipe → the config.json that it is planned with.
RECIPES = {
    "qwen3-4b-colocated": "qwen3-4b",
    "qwen3-4b-async": "qwen3-4b",
    "qwen3-8b-colocated": "qwen3-8b",
    "qwen3-8b-async": "qwen3-8b",
    "qwen2.5-7b-dapo": "qwen2.5-7b",
    "qwen3-30b-a3b-2nodes": "qwen3-30b-a3b",
    "qwen3-30b-a3b-8nodes": "qwen3-30b-a3b",
    "qwen3-30b-a3b-lora": "qwen3-30b-a3b",
    "glm-4.5-air": "glm-4.5-air",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
    "glm-4.5": "glm-4.5",
    "deepseek-r1": "deepseek-r1",
    "qwen3.5-35b-a3b": "qwen3.5-35b-a3b",
    "qwen3-next-80b-a3b": "qwen3-next-80b-a3b",
    "glm-4.7-flash": "glm-4.7-flash",
    "kimi-k2": "kimi-k2",
    "gpt-oss-20b": "gpt-oss-20b",
    "minimax-m2": "minimax-m2",
    "qwen3-8b-agent": "qwen3-8b",
    "qwen3-8b-sft": "qwen3-8b",
    "distill-32b-8b": "qwen3-8b",
    "qwen3-8b-eval": "qwen3-8b",
    "qwen2.5-vl-7b-geometry3k": "qwen2.5-vl-7b",
    "qwen3-vl-30b-a3b-geometry3k": "qwen3-vl-30b-a3b",
}
# Billions of parameters on the models' cards. Those of DeepSeek and GLM without the layer of multi-token prediction,
# that of Qwen3.5 without its vision tower.
PARAMETERS = {
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "qwen2.5-7b": 7.62,
    "qwen3-30b-a3b": 30.5,
    "glm-4.5-air": 106,
    "qwen3-235b-a22b": 235,
    "glm-4.5": 355,
    "deepseek-r1": 671,
    "qwen3.5-35b-a3b": 34.7,
    "qwen3-next-80b-a3b": 80,
    "glm-4.7-flash": 30,
    "kimi-k2": 1027,
    "gpt-oss-20b": 20.9,
    "minimax-m2": 229,
    "qwen2.5-vl-7b": 8.29,
    "qwen2.5-vl-32b": 33.5,
    "qwen2.5-vl-72b": 73.4,
    "qwen3-vl-30b-a3b": 31.1,
}
FULLEST = 0.95  # of a device: an estimate this close may be wrong either way
TEACHER = str(CONFIGS / "qwen3-32b.json")  # of distill-32b-8b
Recorded = Callable[..., list[str]]


@pytest.fixture
def record(tmp_path: Path) -> Recorded:
    """Run a recipe with a `fusionrl` that only writes down its arguments; returns them, or what was said on exit 2."""
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "fusionrl"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" >"$RECORD"\n')
    stub.chmod(0o755)

    def run(name: str, *flags: str, code: int = 0, **variables: str) -> list[str]:
        file = tmp_path / "recorded"
        environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RECORD": str(file), "HOME": str(tmp_path)}
        command = ["bash", str(FOLDER / f"{name}.sh"), *flags]
        done = subprocess.run(command, env=environ | variables, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stderr.splitlines() if code else file.read_text().split("\0")[:-1]

    return run


def config_of(name: str) -> str:
    return str(CONFIGS / f"{RECIPES[name]}.json")


def test_every_recipe_is_checked_and_described() -> None:
    assert {path.stem for path in FOLDER.glob("*.sh")} - {"common"} == set(RECIPES)
    page = (REPO / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")
    assert [name for name in RECIPES if f"| `{name}.sh` |" not in page] == []
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_shapes_are_the_published_ones(name: str) -> None:
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
    assert "/" in raw["_name_or_path"]
    shape = shape_from_hf_config(raw, sees="-vl-" in name)
    assert shape.num_parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_cluster(name: str, record: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    """`fusionrl plan` accepts it: flags parse, the layout divides, every GPU is used, device and host suffice."""
    command = record(name, "plan", MODEL=config_of(name), EVAL_DATA="eval.jsonl", TEACHER=TEACHER)
    assert command[0] == "plan"
    code = cli.main(command)
    text, errors = capsys.readouterr()
    assert code == 0, errors
    nodes, gpus, kind = command[command.index("--cluster") + 1].split("x")
    assert f"placement  {int(nodes) * int(gpus)} devices" in text
    assert "idle [" not in text
    assert "warning    " not in text, text
    (verdict,) = (line for line in text.splitlines() if line.startswith("verdict"))
    fit = re.search(r"fits: ([\d.]+) of ([\d.]+) GiB", verdict)
    assert fit is not None and "DOES NOT" not in verdict, verdict
    if command[command.index("--mode") + 1 if "--mode" in command else 0] != "eval":  # an engine takes what there is
        assert float(fit[1]) <= FULLEST * float(fit[2]), verdict
        assert abs(int(shown_gib(name)) - float(fit[1])) <= 0.5, f"docs/guides/recipes.md: {verdict}"
    else:
        assert shown_gib(name) == ""
    header = " ".join(line.removeprefix("#") for line in _header(name))
    stated = "one node" if nodes == "1" else f"{nodes} nodes"
    assert re.search(rf"{stated} of\s+{gpus} {kind.upper()}", header), header
    host = re.search(r"at least ([\d,]+) GiB host\s+memory", header)
    needed = re.search(r"a node, host memory: ([\d.]+) GiB", text)
    assert host is not None and needed is not None
    assert float(needed[1]) <= float(host[1]) <= 1.5 * float(needed[1]), (host[1], needed[1])


def shown_gib(name: str) -> str:
    """The column GiB of a recipe in docs/guides/recipes.md."""
    lines = (REPO / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8").splitlines()
    titles = next(line for line in lines if line.startswith("| recipe |")).split("|")
    (row,) = (line for line in lines if line.startswith(f"| `{name}.sh` |"))
    return row.split("|")[titles.index(" GiB ")].strip()


def _header(name: str) -> list[str]:
    lines = (FOLDER / f"{name}.sh").read_text(encoding="utf-8").splitlines()[1:]
    return lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]


@pytest.mark.parametrize("name", RECIPES)
def test_train_gets_the_flags_that_were_planned(name: str, record: Recorded) -> None:
    planned = record(name, "plan", "--seed", "7", MODEL=config_of(name), DATA="rows.jsonl", EVAL_DATA="held-out.jsonl")
    variables = {"DATA": "rows.jsonl", "EVAL_DATA": "held-out.jsonl", "RAY_ADDRESS": "head:6379", "RUN_DIR": "/runs/a"}
    command = record(name, "--seed", "7", MODEL=config_of(name), **variables)
    assert command[0] == "train" and command[-2:] == ["--seed", "7"]
    config, errors = read_args(command[1:])
    assert errors == []
    assert (config.cluster.ray_address, config.run.run_dir, config.run.name) == ("head:6379", "/runs/a", name)
    same = planned[planned.index("--cluster") + 2 :]
    same = [value.replace("runs/", "/runs/a/") if value == "runs/qwen3-8b-sft" else value for value in same]
    assert command[-len(same) :] == same


def test_what_is_missing_is_said(record: Recorded) -> None:
    (said,) = record("qwen3-4b-colocated", code=2)
    assert "error: set DATA" in said
    (said,) = record("glm-4.5-air", code=2, DATA="rows.jsonl")
    assert "takes 4 nodes" in said and "RAY_ADDRESS" in said


def test_the_teacher_is_in_the_plan(record: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    """32.8 B parameters in bf16: 61 GiB, which fill one GPU and fit on two."""
    command = record("distill-32b-8b", "plan", MODEL=config_of("distill-32b-8b"), TEACHER=TEACHER)
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert re.search(r"a device, teacher: [\d.]+ GiB = weights 30\.5 \+ KV cache", text), text
    assert "verdict    fits: " in text and "teacher (its own memory)" not in text
    alone = ["--opd-teacher-num-gpus-per-engine", "1", "--opd-teacher-server-args", '{"mem_fraction_static": 0.75}']
    assert cli.main([*command, *alone]) == 0
    (verdict,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("verdict"))
    assert "DOES NOT FIT: the teacher's engine's KV cache has room for 0 tokens" in verdict
    assert "it would with --opd-teacher-num-gpus-per-engine 2" in verdict


def test_too_large_a_layout_is_seen(record: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    """The memory verdict, which the recipes are held to, does change where the layout does."""
    name = "qwen3-30b-a3b-2nodes"
    assert cli.main([*record(name, "plan", MODEL=config_of(name)), "--expert-model-parallel-size", "1"]) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out
