"""The path that a mistyped one may have meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionrl.base.spelling import closest, hint, nearest
from fusionrl.data.rows import read_rows
from fusionrl.models.shape import read_model_shape


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    (tmp_path / "model-small").mkdir()
    return tmp_path


def test_the_first_wrong_part_is_set_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nearest(folder / "data" / "trian.jsonl") == str(folder / "data" / "train.jsonl")
    assert nearest(folder / "dta" / "train.jsonl") == str(folder / "data")
    assert nearest(folder / "data" / "zzz") is None
    assert nearest(folder / "dta", Path.is_file) is None
    monkeypatch.chdir(folder)
    assert hint(Path("data/trian.jsonl")) == "; did you mean data/train.jsonl?"


def test_messages_say_it(folder: Path) -> None:
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
