"""Commands on the pages about installing, several nodes, tuning and trouble: each has a row that says what runs it.

That is a test of this file (HERE), a test elsewhere, or nothing (NOT): then its section says that it was not run, or
another paragraph of the page says so of this command by its name. Of a test elsewhere it is checked that there is one
of that name, and not what it does.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fusionrl import cli
from fusionrl.config.fields import FIELDS
from fusionrl.config.plan_flags import PLAN_FLAGS
from fusionrl.observe.metrics import MetricsSink
from fusionrl.observe.rollouts import RolloutWriter
from tests.observe.view_runs import sample

REPO = Path(__file__).parents[1]
HERE, NOT = "this file", "not run"
SETUP = (
    "tests/tools/test_setup_env.py::test_nothing_is_done_while_the_stamp_fits_and_an_install_is_tried_when_it_does_not"
)
STARTERS = "tests/recipes/test_starters.py"
TWO_NODES = "tests/e2e/test_two_nodes.py::test_two_nodes"
# Page → command, or its beginning before " …" → what runs it. Of a test that runs it otherwise than it is written
# (other hosts, another recipe), the section says so.
ROWS: dict[str, dict[str, str]] = {
    "install": {
        "bash scripts/setup-env.sh": SETUP,
        "fusionrl doctor": "tests/checks/doctor/test_run.py::test_without_deep_it_takes_seconds",
        "source .venv/bin/activate": HERE,
        "docker …": NOT,
        "apptainer …": NOT,
        "python3.12 -m pip download …": NOT,
        "hf download …": NOT,
        "PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/wheels bash scripts/setup-env.sh": NOT,
        "HF_HUB_OFFLINE=1 fusionrl train …": NOT,
        "export HTTPS_PROXY=http://proxy.example:3128 HTTP_PROXY=http://proxy.example:3128": NOT,
        "export NO_PROXY=localhost,127.0.0.1,10.0.0.0/8": NOT,
        "rm -rf .venv": HERE,
    },
    "multinode": {
        "fusionrl train … --ray-address HOST:PORT": TWO_NODES,
        "fusionrl train … --ray-address HEAD:6379": TWO_NODES,
        "fusionrl doctor FLAGS --ray-address HEAD:6379": TWO_NODES,
        'export FORWARD="NCCL_SOCKET_IFNAME" NCCL_SOCKET_IFNAME=eth0': f"{STARTERS}::test_ssh",
        "DATA=/shared/train.jsonl RUN_DIR=/shared/runs/air MODEL=/shared/GLM-4.5-Air bash scripts/cluster/ssh.sh …": (
            f"{STARTERS}::test_ssh"
        ),
        "export DATA=/shared/train.jsonl RUN_DIR=/shared/runs/air MODEL=/shared/GLM-4.5-Air": f"{STARTERS}::test_slurm",
        "sbatch --nodes=4 …": NOT,
        "kubectl …": NOT,
        "head=$(kubectl get pods …": NOT,
        "python tools/check_crd.py CRD.yaml scripts/cluster/kuberay.yaml": (
            "tests/recipes/test_kuberay.py::test_the_command"
        ),
        "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32)": NOT,
        "ray start": NOT,
        "ray start --head --port 6379 --include-dashboard=false": NOT,
        "ray start --address HEAD:6379": NOT,
        "ray stop": NOT,
        "ray status": NOT,
        "nc -vz HEAD 6379": NOT,
        "ssh HOST": NOT,
    },
    "tuning": {
        "tail -n 1 runs/try/metrics.jsonl | …": HERE,
        "fusionrl metrics perf/engines_idle": HERE,
    },
    "faq": {
        "fusionrl show runs/try --step 1 …": HERE,
        "fusionrl doctor FLAGS": TWO_NODES,
        "fusionrl show RUN --step 1": HERE,
        "fusionrl train … --in-process": "tests/e2e/test_in_process.py::test_breakpoints_stop_in_the_terminal",
        "bash scripts/setup-env.sh": SETUP,
        "rm -rf .venv": HERE,
        "ip -brief address": NOT,
        "ray start --port": NOT,
        "ray status": NOT,
    },
}
# A name alone is the name of a program, and no command to type.
_PROGRAM = re.compile(
    r"(?:fusionrl|python[\d.]*|bash|ray|rm|docker|hf|ip|nc|kubectl|sbatch|apptainer|tail|source|ssh) "
)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Flags of other programs in the text.
OTHERS = {
    "--ipc",
    "--bind",
    "--shm-size",
    "--ulimit",
    "--network",
    "--gpus",
    "--exclusive",
    "--no-deps",
    "--num-gpus",
} | {*("--resources", "--nv", "--pdb", "--resume")}


def page_of(name: str) -> Path:
    """The page of this name, in whatever folder."""
    (page,) = (REPO / "docs").rglob(f"{name}.md")
    return page


def sections(page: str) -> list[str]:
    """Texts of a page between headings."""
    return re.split(r"^## ", page_of(page).read_text(encoding="utf-8"), flags=re.MULTILINE)


def commands(section: str) -> Iterator[str]:
    """Lines of a section's blocks, and commands in its text."""
    for kind, block in _BLOCK.findall(section):
        if kind != "python":
            lines = (re.sub(r"\s+#.*", "", line).strip() for line in block.replace("\\\n", " ").splitlines())
            yield from (re.sub(r"\s+", " ", line) for line in lines if line)
    for span in re.findall(r"`([^`]+)`", _BLOCK.sub("", section)):
        if _PROGRAM.match(span):
            yield " ".join(span.split())


def row_of(rows: dict[str, str], command: str) -> str | None:
    """Return the row of a command: the same words, or all that stand before the row's " …"."""
    beginnings = (row for row in rows if row.endswith(" …") and command.startswith(row.removesuffix("…")))
    return command if command in rows else next(beginnings, None)


def is_told(command: str, section: str, page: str) -> bool:
    """Return whether a page says of a command that it was not run."""
    if "not run" in section.lower():
        return True
    told = [paragraph for paragraph in page.split("\n\n") if "not run" in paragraph.lower()]
    return any(f"{command} ".startswith(f"{name} ") for text in told for name in re.findall(r"`([^`]+)`", text))


def wrong_commands(rows: dict[str, str], texts: Sequence[str]) -> list[str]:
    """Return what is wrong with the commands in a page's sections, and with rows that none of them has."""
    used, wrong = set(), []
    for section in texts:
        for command in commands(section):
            row = row_of(rows, command)
            if row is None and re.fullmatch(r"fusionrl \w+|python -m venv", command):
                continue  # the name of a command
            if row is None:
                wrong.append(
                    f"{command}: say in tests/test_doc_commands.py what runs it, and on the page if nothing does"
                )
                continue
            used.add(row)
            if rows[row] == NOT and not is_told(command, section, "\n## ".join(texts)):
                wrong.append(f"{command}: the page does not say that it was not run")
    return wrong + [f"{row}: gone from the page" for row in rows if row not in used]


@pytest.mark.parametrize("page", ROWS)
def test_each_command_was_run_or_its_page_says_not(page: str) -> None:
    assert wrong_commands(ROWS[page], sections(page)) == []


def test_what_is_wrong_on_a_page_is_found() -> None:
    rows = {"ray stop": NOT, "ray start …": NOT, "ip -brief address": NOT}
    texts = ["One\n\n`ray start --head`, `ip -brief address`\n", "Two\n\n`ray stop now`\n", "Three\n\nNot run: `ip`."]
    found = wrong_commands(rows, texts)
    assert [one.partition(":")[0] for one in found] == ["ray start --head", "ray stop now", "ray stop"], found


@pytest.mark.parametrize(
    "place", sorted({place for rows in ROWS.values() for place in rows.values() if place not in (HERE, NOT)})
)
def test_what_runs_them_is_there(place: str) -> None:
    file, _, name = place.partition("::")
    assert name.startswith("test_")
    assert re.search(rf"^def {name}\(", (REPO / file).read_text(encoding="utf-8"), re.MULTILINE), place


def test_what_this_file_runs_is_typed_in_it() -> None:
    typed_here = set(re.findall(r'typed\("(\w+)", "([^"]+)"\)', Path(__file__).read_text(encoding="utf-8")))
    for page, rows in ROWS.items():
        for command in (command for command, place in rows.items() if place == HERE):
            assert any(page == one and command.startswith(beginning) for one, beginning in typed_here), (page, command)


@pytest.mark.parametrize("page", ROWS)
def test_their_flags_exist(page: str) -> None:
    text = page_of(page).read_text(encoding="utf-8")
    spans = [span for span in re.findall(r"`([^`]+)`", _BLOCK.sub("", text)) if span.startswith(("--", "fusionrl "))]
    spans += [command for command in commands(text) if " fusionrl " in f" {command}"]
    names = {name for span in spans for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    from fusionrl.config.upstream_flags import megatron_fields

    megatron = [name for fields in megatron_fields().values() for name in fields]
    known = {"--" + name.replace("_", "-") for name in (*FIELDS, *megatron)} | {*PLAN_FLAGS} | OTHERS
    unknown = {name for name in names if not name.startswith("--sglang-") and name not in known}
    # A switch that is on by itself has its opposite.
    unknown -= {name for name in unknown if name.startswith("--no-") and "--" + name.removeprefix("--no-") in known}
    assert unknown <= SHOWN_BY_COMMANDS, f"docs/{page}.md names flags that fusionrl does not have: {sorted(unknown)}"


SHOWN_BY_COMMANDS = {"--step", "--worst", "--all-equal"}  # of `fusionrl show`


@pytest.fixture
def in_a_folder_with_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with runs/try of three steps."""
    writer = RolloutWriter(tmp_path / "runs" / "try")
    for step in range(4):
        writer.write(step, 1, [sample(index, reward=float(index // 2)) for index in range(12)])
    MetricsSink(tmp_path / "runs" / "try", 1).log(
        3, {"perf/engines_idle": 0.25, "pipeline/staleness_mean": 1.0, "train/loss": 0.5}
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(page: str, beginning: str) -> list[str]:
    """The commands of a page that begin so."""
    found = [command for section in sections(page) for command in commands(section) if command.startswith(beginning)]
    assert found
    return list(dict.fromkeys(found))


def test_an_environment_is_entered_and_removed(tmp_path: Path) -> None:
    (enter,), (remove,) = typed("install", "source .venv/bin/activate"), typed("install", "rm -rf .venv")
    assert typed("faq", "rm -rf .venv") == [remove]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True)
    for command, wanted in ((f"{enter} && command -v python", f"{tmp_path}/.venv/bin/python\n"), (remove, "")):
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == wanted
    assert not list(tmp_path.iterdir())


def test_a_step_of_the_metrics(in_a_folder_with_runs: Path) -> None:
    (command,) = typed("tuning", "tail -n 1")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert "perf/engines_idle" in done.stdout and "train/loss" not in done.stdout


def test_the_definition_of_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = typed("tuning", "fusionrl metrics perf")
    assert cli.main(command.split()[1:]) == 0
    assert "perf/engines_idle" in capsys.readouterr().out


def test_samples_are_shown(in_a_folder_with_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worst, equal = typed("faq", "fusionrl show runs/try")
    (step,) = typed("faq", "fusionrl show RUN")
    for command in (worst, equal, step.replace("RUN", "runs/try")):
        assert cli.main(command.split()[1:]) == 0, command
        assert "question" in capsys.readouterr().out, command


def test_the_python_lines(in_a_folder_with_runs: Path) -> None:
    (code,) = (block for kind, block in _BLOCK.findall(page_of("faq").read_text()) if kind == "python")
    Path("lines.py").write_text(code)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("lines.py")
    assert len(printed.getvalue().splitlines()) == 12
