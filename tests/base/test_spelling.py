"""The path that a mistyped one may have meant."""

from pathlib import Path

import pytest

from fusionrl.base.wording import closest, hint, nearest
from fusionrl.data.rows import read_rows
from fusionrl.models.shape import read_model_shape


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
