"""Near names and paths, and the cure of a missing package: the set that pins it."""

import re
from pathlib import Path

import pytest

from fusionrl.base.wording import SETS, closest, hint, install_hint, nearest
from fusionrl.data.rows import read_rows
from fusionrl.models.shape import read_model_shape

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


def test_the_first_wrong_part_is_set_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path
    for name in ("data", "model-small"):
        (folder / name).mkdir()
    (folder / "data" / "train.jsonl").touch()
    assert nearest(folder / "data" / "trian.jsonl") == str(folder / "data" / "train.jsonl")
    assert nearest(folder / "dta" / "train.jsonl") == str(folder / "data")
    assert nearest(folder / "data" / "zzz") is nearest(folder / "dta", Path.is_file) is None
    monkeypatch.chdir(folder)
    assert hint(Path("data/trian.jsonl")) == "; did you mean data/train.jsonl?"
    with pytest.raises(ValueError, match=r"no such file; did you mean .*data/train\.jsonl\?"):
        list(read_rows(folder / "data" / "tran.jsonl"))
    with pytest.raises(ValueError, match=r"no such folder; did you mean .*model-small\?"):
        read_model_shape(folder / "model_small")


@pytest.mark.parametrize(
    ("word", "names", "wanted"),
    [
        ("gpro", ["gspo", "grpo", "dr_grpo"], "grpo"),
        ("trian", ["train", "plan"], "train"),
        ("kl", ["lr", "seed"], None),
        ("temprature", ["temperature", "top_p"], "temperature"),
        ("grpo", ["grpo"], "grpo"),
    ],
)
def test_the_name_that_was_meant(word: str, names: list[str], wanted: str | None) -> None:
    assert closest(word, names) == wanted
