"""Commands of the documentation that are run here, as the pages have them, and the flags that these pages name."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusionrl import cli
from fusionrl.config.config import FIELDS
from fusionrl.observe.metrics import MetricsSink
from fusionrl.observe.rollouts import RolloutWriter
from tests.observe.view_runs import sample

DOCS = Path(__file__).parents[1] / "docs"
TROUBLE = "guides/trouble"
GET_STARTED = [f"get-started/{path.stem}" for path in sorted(DOCS.glob("get-started/*.md"))]
PAGES = [*GET_STARTED, "guides/multinode", "guides/profiling", TROUBLE]
# A name alone is the name of a program, and not a command to type.
_PROGRAM = re.compile(
    r"(?:fusionrl|python[\d.]*|bash|ray|rm|docker|hf|ip|nc|kubectl|sbatch|apptainer|tail|source|ssh) "
)
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
OF_OTHER_PROGRAMS = {
    *("--ipc", "--bind", "--shm-size", "--ulimit", "--network", "--gpus", "--exclusive", "--no-deps", "--num-gpus"),
    *("--resources", "--nv", "--pdb", "--resume", "--step", "--worst", "--all-equal", "--config", "--deep"),
    *("--steps", "--samples", "--attempt", "--check", "--with-samples"),
}


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def commands(text: str) -> Iterator[str]:
    """Lines of a page's blocks, and commands in its text."""
    for language, block in _BLOCK.findall(text):
        if language != "python":
            lines = (re.sub(r"\s+#.*", "", line).strip() for line in block.replace("\\\n", " ").splitlines())
            yield from (re.sub(r"\s+", " ", line) for line in lines if line)
    for span in re.findall(r"`([^`]+)`", _BLOCK.sub("", text)):
        if _PROGRAM.match(span):
            yield " ".join(span.split())


def typed(page: str, beginning: str) -> list[str]:
    """The commands of a page that begin so."""
    matches = [command for command in commands(text_of(page)) if command.startswith(beginning)]
    assert matches
    return list(dict.fromkeys(matches))


@pytest.mark.parametrize("page", PAGES)
def test_the_flags_of_a_page_exist(page: str) -> None:
    text = text_of(page)
    spans = [span for span in re.findall(r"`([^`]+)`", _BLOCK.sub("", text)) if span.startswith(("--", "fusionrl "))]
    spans += [command for command in commands(text) if " fusionrl " in f" {command}"]
    names = {name for span in spans for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    known = {"--" + name.replace("_", "-") for name in FIELDS} | OF_OTHER_PROGRAMS
    unknown = {name for name in names if not name.startswith("--sglang-") and name not in known}
    # A switch that is on by itself has its opposite.
    unknown -= {name for name in unknown if name.startswith("--no-") and "--" + name.removeprefix("--no-") in known}
    if unknown:
        from fusionrl.config.upstream_flags import megatron_fields  # seconds

        unknown -= {"--" + name.replace("_", "-") for fields in megatron_fields().values() for name in fields}
    assert not unknown, f"docs/{page}.md names flags that fusionrl does not have: {sorted(unknown)}"


@pytest.fixture
def in_a_folder_with_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with runs/try of three steps."""
    writer = RolloutWriter(tmp_path / "runs" / "try")
    for step in range(4):
        writer.write(step, 1, [sample(index, reward=float(index // 2)) for index in range(12)])
    values = {"perf/engines_idle": 0.25, "pipeline/staleness_mean": 1.0, "train/loss": 0.5}
    MetricsSink(tmp_path / "runs" / "try", 1).log(3, values)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_step_of_the_metrics(in_a_folder_with_runs: Path) -> None:
    (command,) = typed("guides/profiling", "tail -n 1")
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=True)
    assert "perf/engines_idle" in done.stdout and "train/loss" not in done.stdout


def test_samples_and_definitions_are_shown(in_a_folder_with_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worst, equal = typed(TROUBLE, "fusionrl show runs/try")
    (step,) = typed(TROUBLE, "fusionrl show RUN --step 1")
    (metric,) = typed("guides/profiling", "fusionrl metrics perf")
    for command in (worst, equal, step.replace("RUN", "runs/try"), metric):
        assert cli.main(command.split()[1:]) == 0, command
        assert ("perf/engines_idle" if command == metric else "question") in capsys.readouterr().out, command


def test_the_python_lines(in_a_folder_with_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for language, block in _BLOCK.findall(text_of(TROUBLE)) if "runs/try/rollouts" in block)
    exec(code, {})
    assert len(capsys.readouterr().out.splitlines()) == 12
