"""The Dockerfile: its files are there, and the environment that it builds is not overwritten by one of the context."""

import re
import shlex
from pathlib import Path

REPO = Path(__file__).parents[2]


def steps() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, in order."""
    lines = [
        line for line in (REPO / "Dockerfile").read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest) for line in joined.splitlines() if line.strip() for name, _, rest in [line.partition(" ")]]


def test_what_is_copied_exists_and_is_enough_for_the_environment() -> None:
    copied = [word for name, rest in steps() if name == "COPY" for word in shlex.split(rest)[:-1]]
    assert [word for word in copied if not (REPO / word).exists()] == []
    install = next(number for number, (_, rest) in enumerate(steps()) if "setup-env.sh" in rest and "PYTHON=" in rest)
    before = {word for name, rest in steps()[:install] if name == "COPY" for word in shlex.split(rest)[:-1]}
    # setup-env.sh reads the requirements, and builds the project, whose setup.py reads pyproject.toml only where it is.
    assert {"setup.py", "LICENSE", "requirements", "scripts/setup-env.sh", "fusionrl/__init__.py"} <= before


def test_the_contexts_own_environment_stays_out() -> None:
    names = [name for name, _ in steps()]
    assert names.index("FROM") == 0 and ("COPY", ". .") in steps()
    ignored = (REPO / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".venv*", ".git", "runs"} <= set(ignored)


def test_its_python_is_new_enough() -> None:
    text = (REPO / "Dockerfile").read_text(encoding="utf-8")
    (python,) = set(re.findall(r"PYTHON=python(3\.\d+)", text))
    (minimum,) = re.findall(
        r'gpu\).*minimum="3, (\d+)"', (REPO / "scripts" / "setup-env.sh").read_text(encoding="utf-8")
    )
    assert int(python.split(".")[1]) >= int(minimum)
    assert f"python{python}-venv" in text and f"python{python}-dev" in text
