"""A resume that cannot work is refused before anything starts, by `fusionrl plan` as by `train`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl import cli
from fusionrl.buffer.data_source import RolloutDataSourceWithBuffer
from fusionrl.config.parser import parse_args
from fusionrl.models.shape import read_model_shape
from fusionrl.models.trainable import Adapted, AdapterSpec, base_identity
from fusionrl.observe.run_dir import RunDir
from fusionrl.runtime.checkpoints import Checkpoints
from tests.tiny_model import make_tiny_qwen3

Rows = Callable[..., Path]


def rows(count: int) -> list[dict[str, str]]:
    return [{"input": f"{i}+1=", "label": str(i + 1), "adapter": "math"} for i in range(count)]


def flags(model: Path, data: Path, run_dir: Path) -> list[str]:
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(data), "--label-key", "label", "--rm-type", "exact"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "4"),
        *("--num-rollout", "2", "--device", "cpu", "--run-dir", str(run_dir)),
    ]


@pytest.fixture
def run(tiny_model: Path, write_rows: Rows, tmp_path: Path) -> list[str]:
    """Flags of a run whose folder has a checkpoint of its first step."""
    argv = flags(tiny_model, write_rows(rows(10)), tmp_path / "runs" / "first")
    config = parse_args(argv)
    with RunDir(tmp_path / "runs" / "first") as folder:
        folder.write_config(config.model_dump())
        checkpoints = Checkpoints(folder.checkpoints)
        writing = checkpoints.begin(0)
        (writing / "trainer").mkdir()
        shape = read_model_shape(tiny_model).model_dump(mode="json")
        (writing / "trainer" / "fusionrl.json").write_text(json.dumps({"format": 2, "shape": shape}))
        source = RolloutDataSourceWithBuffer(config.to_args())
        source.get_samples(4)
        (writing / "buffer.json").write_text(json.dumps({"rollout_id": 0, "source": source.state_dict()}))
        checkpoints.publish(0, writing, {})
    return argv


def errors(capsys: pytest.CaptureFixture[str], argv: list[str], command: str = "plan") -> str:
    """Messages of a command that is refused."""
    assert cli.main([command, *argv]) == 2
    return capsys.readouterr().err


def plan(capsys: pytest.CaptureFixture[str], argv: list[str]) -> Any:
    """What a plan shows."""
    assert cli.main(["plan", *argv]) == 0
    return capsys.readouterr()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_run_goes_on_and_its_folder_is_only_read(run: list[str], tmp_path: Path, capsys: Any) -> None:
    before = files(tmp_path / "runs")
    assert "resume " not in plan(capsys, [*run, "--resume"]).out
    shown = plan(capsys, [*run, "--resume", "--lr", "1e-3", "--num-rollout", "6"]).out
    assert "resume     --lr 1e-06 -> 0.001" in shown and "resume     --num-rollout 2 -> 6" in shown
    assert "nothing is left" not in shown
    shown = plan(capsys, [*run, "--resume", "--lr-decay-style", "linear", "--num-rollout", "1"]).out
    assert "resume     nothing is left to do: step_000001 is after step 1, and the run ends after step 1" in shown
    assert "next step" not in shown
    assert files(tmp_path / "runs") == before


def test_what_does_not_fit_the_run_is_refused(run: list[str], write_rows: Rows, tmp_path: Path, capsys: Any) -> None:
    assert "already holds a run: pass --resume" in errors(capsys, run)
    other = ["--prompt-data", str(write_rows(rows(8), "other.jsonl"))]
    for command in ("plan", "train"):
        found = errors(capsys, [*run, "--resume", *other], command)
        assert "--prompt-data other: its 8 prompts are not the 10 of the checkpoint" in found
    found = errors(capsys, [*run, "--resume", "--lora-rank", "8", "--lr", "1e-4"])
    assert "trainer: it has weights and no adapters; leave out --lora-rank to resume" in found
    larger = make_tiny_qwen3(tmp_path / "larger", seed=0, num_layers=3)
    found = errors(capsys, [*run, "--resume", "--hf-checkpoint", str(larger)])
    assert "num_layers" in found and "--hf-checkpoint" in found


def test_several_adapters_are_those_of_the_run(run: list[str], tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    checkpoints = Checkpoints(tmp_path / "runs" / "first" / "checkpoints")
    before, several = checkpoints.folder / "step_000001", checkpoints.begin(1)
    adapted = Adapted(adapters=AdapterSpec(rank=8, alpha=32), base="moved", identity=base_identity(str(tiny_model)))
    description = json.loads((before / "trainer" / "fusionrl.json").read_text())
    description["adapted"] = adapted.model_dump(mode="json")
    for name in ("math", "code"):
        (several / f"trainer-{name}").mkdir()
        (several / f"trainer-{name}" / "fusionrl.json").write_text(json.dumps(description))
    lora = [*run, "--resume", "--num-rollout", "4", "--lora-rank", "8", "--lr", "1e-4"]
    source = RolloutDataSourceWithBuffer(parse_args([*lora, "--lora-adapters", "math", "code"]).to_args())
    (several / "buffer.json").write_text(json.dumps({"rollout_id": 1, "source": source.state_dict()}))
    checkpoints.publish(1, several, {})
    for names in (["math", "code"], ["code", "math"]):
        plan(capsys, [*lora, "--lora-adapters", *names])
    for names in (["--lora-adapters", "math", "poetry"], ["--lora-adapters", "math"], []):
        assert "it has the adapters code, math; a resume needs the --lora-adapters" in errors(capsys, [*lora, *names])
    shutil.rmtree(checkpoints.folder / "step_000002")
    found = errors(capsys, [*lora, "--lora-adapters", "math", "code"])
    assert "it has one adapter, or none; a resume needs the --lora-adapters" in found


def test_what_the_checkpoint_lacks(run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "first"
    assert "it has no critic" in errors(capsys, [*run, "--resume", "--advantage-estimator", "ppo"])
    with RunDir(folder, resume=True):
        assert "is in use by the live process" in errors(capsys, [*run, "--resume"])
    (folder / "checkpoints" / "step_000001" / "buffer.json").write_text("{}")
    assert "damaged or incomplete" in errors(capsys, [*run, "--resume"])
    (folder / "checkpoints" / "step_000001" / "manifest.json").unlink()
    assert cli.main(["plan", *run, "--resume"]) == 0, "it starts at step 0, and the console says so"


def test_a_folder_that_is_not_there_is_warned_of_and_the_nearest_named(run, tmp_path, capsys) -> None:
    """A launch script may always pass --resume, but a typo starts a new run: that is said before anything starts."""
    (tmp_path / "runs" / "a-model").mkdir()
    (tmp_path / "runs" / "a-model" / "config.json").write_text('{"model_type": "qwen3"}')
    for name, nearest in {
        "runs/frist": f"the nearest one is {tmp_path}/runs/first",
        "runs/xyz": f"({tmp_path}/runs has the runs first)",
        "rnus/first": f"the nearest one is {tmp_path}/runs",
    }.items():
        told = plan(capsys, [*run, "--resume", "--run-dir", str(tmp_path / name)]).err
        assert f"warning: --resume: there is no folder --run-dir {tmp_path}/{name}: a new run starts there" in told
        assert nearest in told
        assert not (tmp_path / name).exists()
    assert "a new run starts" not in plan(capsys, [*run, "--resume"]).err


# ------------------------------------------------------------------------------- the flags of the run itself
def test_a_short_command_takes_the_flags_of_the_run(run: list[str], tmp_path: Path, capsys: Any) -> None:
    """`fusionrl train --run-dir X --resume`; what is given goes before it, and the console says so."""
    short = ["--run-dir", str(tmp_path / "runs" / "first"), "--resume"]
    shown = plan(capsys, short)
    assert "2 rollout steps" in shown.out and "resume " not in shown.out
    assert f"flags that are not given are those of {tmp_path}/runs/first/config.json" in shown.err
    shown = plan(capsys, [*short, "--num-rollout", "6", "--lr", "1e-3"])
    assert "6 rollout steps" in shown.out and "resume     --lr 1e-06 -> 0.001" in shown.out


def test_the_newest_flags_of_the_run_count(run: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    with RunDir(folder, resume=True) as opened:
        opened.write_config(parse_args([*run, "--resume", "--lr", "5e-4"]).model_dump())
    short = parse_args(["--run-dir", str(folder), "--resume", "--num-rollout", "9"])
    assert short.train.lr == 5e-4 and short.run.num_rollout == 9 and short.run.resume
    # A whole command is taken as it stands: a flag that it leaves out has its default.
    assert parse_args([*run, "--resume"]).train.lr == 1e-6


def test_a_config_file_that_resumes_without_flags_says_so_once(run: list[str], tmp_path: Path, capsys: Any) -> None:
    """Only a short command line takes the run's flags; a file of flags is taken as it stands. So of an empty folder."""
    folder, file = tmp_path / "runs" / "first", tmp_path / "resume.yaml"
    file.write_text(f"resume: true\nrun-dir: {folder}\n")
    for argv in ([], ["--lr", "1e-5"]):
        found = errors(capsys, ["--config", str(file), *argv])
        assert found.count("error: ") == 1 and f"`fusionrl train --run-dir {folder} --resume`" in found
    file.write_text("lr: 1e-5\n")
    assert "without --config" in errors(capsys, ["--config", str(file), "--run-dir", str(folder), "--resume"])
    assert errors(capsys, ["--run-dir", str(tmp_path), "--resume"]).count("error: ") == 1
    found = errors(capsys, ["--run-dir", str(tmp_path / "none"), "--resume"])
    assert found.count("error: ") == 1 and "there is no folder" in found
    assert errors(capsys, ["--resume"]) == "error: --resume: name the run's folder with --run-dir\n"


def test_flags_of_somebody_else_are_not_taken(run: list[str], tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """They may name functions, which would run."""
    folder, short = tmp_path / "runs" / "first", ["--run-dir", str(tmp_path / "runs" / "first"), "--resume"]
    with monkeypatch.context() as patched:
        patched.setattr("os.getuid", lambda: 12345)
        assert "no config.json of yours" in errors(capsys, short)
    (folder / "config.json").rename(tmp_path / "elsewhere.json")
    (folder / "config.json").symlink_to(tmp_path / "elsewhere.json")
    assert "is a link or a special file" in errors(capsys, short)
