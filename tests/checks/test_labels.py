"""Labels that a built-in reward cannot grade with are found before the run, by the reward's own parser."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl import cli
from fusionrl.checks.validate import validate
from fusionrl.config.config import Config
from fusionrl.rewards.registry import RM_TYPES, LabelCheck, grade

Rows = Callable[..., Path]
Found = Callable[..., tuple[list[str], tuple[str, ...]]]


@pytest.fixture
def found(tiny_model: Path, write_rows: Rows) -> Found:
    """found(rows, field=value, …) -> (errors, warnings of the data)."""

    def find(rows: list[Any], **changes: Any) -> tuple[list[str], tuple[str, ...]]:
        base = {"hf_checkpoint": str(tiny_model), "prompt_data": str(write_rows(rows)), "input_key": "prompt"}
        sizes = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 1, "rollout_max_response_len": 4}
        base |= sizes | {"rm_type": "last_number", "device": "cpu"}
        values = {name: value for name, value in (base | changes).items() if value is not None}
        checked, errors = validate(Config.from_flat(values))
        return errors, checked.data_warnings

    return find


def row(label: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": "1+1=", "label": label, **more}


def test_a_forgotten_label_key_is_an_error_that_names_the_columns(found: Found) -> None:
    (error,), _ = found([row("2"), row("3")])
    assert "no label for --rm-type last_number in 2 of 2 rows (lines 1, 2); the columns are prompt, label" in error
    assert error.endswith(": --label-key label?")
    assert found([row("2")], rm_type="random")[0] == []
    (error,), _ = found([row("2")], rm_type="format:0.2+exact")
    assert "no label for --rm-type format:0.2+exact" in error


def test_a_users_own_function_may_need_no_label(found: Found, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(args, sample, **kw): ...\nasync def generate(args, sample, params): ...\n")
    for row_label, changes in (("2", {}), ("", {"label_key": "label"})):
        assert found([row(row_label)], rm_type=None, custom_rm_path=f"{file}:reward", **changes)[0] == []
    errors, warnings = found([row("2")], custom_generate_function_path=f"{file}:generate")
    assert errors == [] and "no label for --rm-type last_number" in warnings[0]
    config = Config.from_flat({"rollout_function_path": "a.b", "rm_type": "exact"})
    assert LabelCheck.of_run(config) is None, "a rollout function of the user's makes its own samples"
    assert LabelCheck.of_run(Config.from_flat({"mode": "sft", "rm_type": "exact"})) is None


def test_one_bad_label_is_found_with_its_row(found: Found) -> None:
    rows = [row("1"), row("1,234.5"), row(3), row("the answer is nine"), row(""), row([]), row(None)]
    (error,), _ = found(rows, label_key="label")
    assert "column 'label' (--label-key) does not fit --rm-type last_number in 4 of 7 rows (lines 4, 5, 6, …" in error
    assert "line 4: the label 'the answer is nine' is not a number)" in error


@pytest.mark.parametrize(
    ("rm_type", "good", "bad"),
    [
        ("exact", ["a", 4, 0.5], ["", " ", [], ["a"], {}, None]),
        ("f1", ["a", ""], [[], None]),
        ("last_number", ["-7", "1,000", 3], ["", "nine", "nan", [], None]),
        ("math", ["x^2"], ["", [], None]),
        ("math_verl", ["7", r"\boxed{7}"], ["", r"\boxed{7", r"\boxed{}", [], None]),
        ("deepscaler", ["7"], [r"\boxed{", None]),
        ("boxed_exact", ["7"], ["", None]),
        ("dapo", ["34", 34], ["", None]),
        ("gpqa", ["B", 2], ["", "none of them", None]),
        ("code", ['{"inputs": ["1"], "outputs": ["2"]}', ["assert f(1) == 2"]], ["", [], {}, "x", {"inputs": []}]),
        ("code_all", ['["assert f(1) == 2"]'], [[], None]),
        *((needs_none, ["", None], []) for needs_none in ("random", "format", "reward_model", "remote_rm")),
    ],
)
def test_labels_of_each_reward(rm_type: str, good: list[Any], bad: list[Any]) -> None:
    check = LabelCheck(rm_type)
    assert [label for label in good if check(label, {}) is not None] == []
    assert [label for label in bad if check(label, {}) is None] == []


@pytest.mark.parametrize("rm_type", sorted(set(RM_TYPES) - {"random", "format", "ifeval", "math", "deepscaler"}))
def test_no_label_passes_that_ends_a_run(rm_type: str) -> None:
    """A grader raises for a label only where the check told it before."""
    for label in ("", "x", "7", [], {}, None, 3, "[1]", r"\boxed{", '{"asserts": 1}'):
        if LabelCheck(rm_type)(label, {}) is None and not rm_type.startswith("code"):
            grade(rm_type, "the answer is 7", label, {})


def test_the_metadata_of_a_row_counts() -> None:
    assert LabelCheck("gpqa")(None, {"choices": ["x", "y"], "correct_letter": "B"}) is None
    problem = LabelCheck("ifeval")(None, {})
    assert problem is not None and not problem.is_about_label and "instruction_id_list" in problem.reason
    assert LabelCheck("ifeval")(None, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}) is None
    assert LabelCheck("exact")("nine", {"rm_type": "last_number"}) is not None, "the row names its own reward"
    assert LabelCheck(None)("nine", {"rm_type": "no_such"}) is not None
    assert LabelCheck("exact", overrides={"rm_type": "random"})("", {}) is None
    assert LabelCheck("ifbench")(None, {"instruction_id_list": ["count:numbers"]}) is None
    assert LabelCheck("ifbench")(None, {"instruction_id_list": "count:numbers"}) is not None


@pytest.mark.parametrize(
    ("rm_type", "metadata", "said"),
    [
        ("gpqa", {"choices": 5}, "metadata choices 5 is no list"),
        ("gpqa", {"valid_letters": 5}, "metadata valid_letters 5 is no list"),
        ("gpqa", {"choices": ["x", "b"], "valid_letters": ["P"]}, "name none of the letters P"),
        ("ifeval", {"instruction_id_list": [["a"]]}, "instruction_id_list [['a']] is not a list of names"),
        ("ifeval", {"instruction_id_list": ["a"], "kwargs": ["x"]}, "kwargs ['x'] is not a list of dicts"),
    ],
)
def test_metadata_of_another_kind_is_told_in_a_line(rm_type: str, metadata: dict[str, Any], said: str) -> None:
    problem = LabelCheck(rm_type)("B", metadata)
    assert problem is not None and said in problem.reason and "\n" not in problem.reason
    with pytest.raises(ValueError, match=re.escape(said)):
        grade(rm_type, "the answer is B", "B", metadata)


def test_slow_labels_have_a_budget() -> None:
    assert LabelCheck("code", budget_s=0.0)([], {}) is None
    assert LabelCheck("last_number", budget_s=0.0)("nine", {}) is not None, "quick ones are all read"


def test_evaluation_sets_are_checked_by_their_own_reward(found: Found, write_rows: Rows, tmp_path: Path) -> None:
    good, bad = write_rows([row("2")], "good.jsonl"), write_rows([row("2"), row("two")], "bad.jsonl")
    flags = {"label_key": "label", "eval_prompt_data": ["held-out", str(bad)], "eval_interval": 1}
    (error,), _ = found([row("2")], **flags)
    assert error.startswith("--eval-prompt-data") and "line 2" in error and "'two' is not a number" in error
    assert found([row("2")], **flags | {"eval_prompt_data": ["held-out", str(good)]})[0] == []


def test_data_check_reads_labels_as_the_run_does(write_rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows([row("1", prompt="a"), row("nine", prompt="b"), row([], prompt="c")])
    flags = ["--input-key", "prompt", "--rm-type", "last_number"]
    assert cli.main(["data", "check", str(data), *flags, "--label-key", "label"]) == 2
    out = capsys.readouterr().out
    assert "does not fit --rm-type last_number in 2 of 3 rows (lines 2, 3" in out
    assert cli.main(["data", "check", str(data), *flags]) == 2
    assert "the columns are prompt, label: --label-key label?" in capsys.readouterr().out
