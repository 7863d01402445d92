"""The examples of docs/guides/data.md run as they stand there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fusionrl.config.config import Config
from fusionrl.config.hooks import load_function

ROOT = Path(__file__).parents[2]


def block(first_line: str) -> str:
    """The indented block of the page that begins so."""
    lines = (ROOT / "docs" / "guides" / "data.md").read_text(encoding="utf-8").split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith("    " + first_line))
    end = next(number for number in range(start, len(lines)) if lines[number] and lines[number][0] != " ")
    return "\n".join(line[4:] for line in lines[start:end]).strip() + "\n"


def test_the_check(tmp_path: Path) -> None:
    commands, output = block("printf").split("\n\n")
    script = f'fusionrl() {{ "{sys.executable}" -m fusionrl.cli "$@"; }}\n{commands}'
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, output, "")


@pytest.mark.parametrize(
    ("flag", "first_line", "name", "wanted"),
    [
        ("buffer_filter_path", "# newest.py", "newest_first", ["c", "b", "a", "d"]),
        ("data_source_path", "# curriculum.py", "Curriculum", ["a", "b", "c", "d"]),
    ],
)
def test_the_hooks(
    tiny_model: Path,
    write_rows: Callable[..., Path],
    tmp_path: Path,
    flag: str,
    first_line: str,
    name: str,
    wanted: list[str],
) -> None:
    program = tmp_path / first_line.removeprefix("# ")
    program.write_text(block(first_line).split("\nfusionrl ")[0])
    data = write_rows([{"input": text} for text in "abcd"])
    flags = {"hf_checkpoint": str(tiny_model), "prompt_data": str(data), flag: f"{program}:{name}"}
    args = Config.from_flat(flags).to_args()

    source = load_function(args.data_source_path)(args)
    source.add_samples(source.get_samples(3))
    resumed = load_function(args.data_source_path)(args)
    resumed.load_state_dict(source.state_dict())
    groups = resumed.get_samples(4)
    assert [group[0].prompt for group in groups] == wanted
    if name == "Curriculum":
        assert {group[0].metadata["level"] for group in groups} == {1}
