"""Packages that only some runs need: the cure of a missing one is the set that pins it."""

import re
from pathlib import Path

import pytest

from fusionrl.base.wording import SETS, install_hint

ROOT = Path(__file__).parents[2]
# They look at the environment as it is, perhaps one that setup-env.sh did not make.
OF_THE_DOCTOR = ("fusionrl/checks/doctor/nodes.py", "fusionrl/checks/doctor/machine.py")


@pytest.mark.parametrize("name", SETS)
def test_a_set_pins_its_packages(name: str) -> None:
    pinned = re.findall(r"^([\w.-]+)==", ROOT.joinpath(f"requirements/{name}.txt").read_text(), re.M)
    assert set(SETS[name]) <= {package.replace("_", "-").lower() for package in pinned}
    assert all(f"setup-env.sh {name}" in install_hint(package) for package in SETS[name])
    assert "setup-env.sh" not in install_hint("mlflow") and "environment of its own" in install_hint("mlflow")


def test_no_message_asks_for_a_package_by_hand() -> None:
    """docs/get-started/install.md: nothing else is installed into the environment of a run."""
    files = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.joinpath("fusionrl").rglob("*.py")}
    asking = [name for name, text in files.items() if re.search(r"(?<!says `)pip install ", text)]
    assert sorted(asking) == sorted(OF_THE_DOCTOR)
