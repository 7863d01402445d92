"""Evaluation sets: what the flags give, what the file of --eval-config changes, and what it may not hold."""

from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.config.eval_sets import EvalSet, eval_sets

FILE = """
eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6, rm_type: f1}
  datasets:
    - name: a
      path: a.jsonl
    - name: b
      path: b.jsonl
      temperature: 0
      stop: ["#"]
      max_response_len: 64
      custom_rm_path: rewards.py:score
      metadata_overrides: {level: 3}
"""


def sets(tmp_path: Path, text: str | None = None, **flags: Any) -> list[EvalSet]:
    if text is not None:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(text, encoding="utf-8")
        flags["eval_config"] = str(path)
    return eval_sets(Config.from_flat(flags).to_args())


def test_by_flags(tmp_path: Path) -> None:
    flags = {"rollout_temperature": 0.9, "rollout_top_p": 0.8, "eval_top_p": 0.7, "input_key": "q", "rm_type": "math"}
    found = sets(tmp_path, eval_prompt_data=["a", "a.jsonl", "b", "b.jsonl"], n_samples_per_eval_prompt=3, **flags)
    assert [(one.name, one.path) for one in found] == [("a", "a.jsonl"), ("b", "b.jsonl")]
    assert (found[1].temperature, found[1].top_p, found[1].n_samples_per_eval_prompt) == (0.9, 0.7, 3)
    assert (found[1].input_key, found[1].rm_type) == ("q", "math")


def test_a_set_goes_before_the_defaults_and_these_before_the_flags(tmp_path: Path) -> None:
    flags = {"eval_temperature": 0.1, "eval_top_k": 20, "rollout_stop": ["\n"], "rollout_max_response_len": 8}
    a, b = sets(tmp_path, FILE, custom_rm_path="other.py:score", eval_label_key="answer", **flags)
    assert (a.temperature, a.top_k, a.max_response_len, a.stop) == (0.6, 20, 8, ["\n"])
    assert (b.temperature, b.top_k, b.max_response_len, b.stop) == (0.0, 20, 64, ["#"])
    assert a.n_samples_per_eval_prompt == b.n_samples_per_eval_prompt == 4
    assert a.label_key == b.label_key == "answer"
    # One of the two kinds of reward replaces the other.
    assert (a.rm_type, a.custom_rm_path) == ("f1", None)
    assert (b.rm_type, b.custom_rm_path) == (None, "rewards.py:score")
    assert b.metadata_overrides == {"level": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE.replace("temperature: 0\n", "temperature: hot\n"), r"yaml: datasets\[1\].temperature: .* valid number"),
        (FILE.replace("temperature: 0.6", "temperature: -1"), r"yaml: defaults.temperature: .* greater than"),
        (FILE.replace("      temperature: 0\n", "      temp: 0\n"), r"datasets\[1\].temp: unknown key; known are name"),
        (FILE.replace("      path: a.jsonl\n", ""), r"datasets\[0\].path: Field required"),
        (FILE + "      rm_type: f1\n", r"datasets\[1\]: rm_type and custom_rm_path exclude each other"),
        ("eval: {datasets: {a: a.jsonl}}", r"datasets.a: a mapping of keys to values is wanted, not 'a.jsonl'"),
        ("eval: {datasets: a.jsonl}", "a list of sets or a mapping"),
        ("eval: {datasets: [{name: a, path: b}], default: {}}", "default: unknown key"),
        ("{eval: {datasets: [{name: a, path: b}]}, temperature: 1}", "temperature: unknown key"),
        ("eval: [", "not a readable YAML file"),
        (None, "--eval-config none.yaml: not a readable YAML file"),
        ("", "names no sets"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        sets(tmp_path, text, eval_config="none.yaml")
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).startswith("--eval-config ")


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = "{defaults: {temperature: -1}, datasets: {a: {path: a.jsonl, top_p: 2}, b: {}}}"
    with pytest.raises(ValueError, match="--eval-config") as error:
        sets(tmp_path, text)
    assert len(str(error.value).splitlines()) == 3
    found = sets(tmp_path, text.replace("-1", "1").replace("2", "0.5").replace("b: {}", "b: {path: b.jsonl}"))
    assert [(one.name, one.path, one.top_p) for one in found] == [("a", "a.jsonl", 0.5), ("b", "b.jsonl", 1.0)]


def test_a_function_that_evaluates_may_have_keys_of_its_own(tmp_path: Path) -> None:
    text = "eval: {datasets: [{name: a, path: b}], delegate: [{name: skills}]}"
    assert [one.name for one in sets(tmp_path, text, eval_function_path="m.f")] == ["a"]
    with pytest.raises(ValueError, match=r"datasets\[0\].typo: unknown key"):
        sets(tmp_path, text.replace("path: b", "path: b, typo: 1"), eval_function_path="m.f")
