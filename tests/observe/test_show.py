"""`fusionrl show`: the right samples, safe for a terminal, readable by programs, quick on big files."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from fusionrl import cli
from fusionrl.observe.advice import Glimpse
from fusionrl.observe.formats import as_text
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.observe.show import sample_table
from tests.observe.view_runs import sample
from tests.own_process import run_code

Capsys = pytest.CaptureFixture[str]

REWARDS = [0.0, 1.0, 0.5, 0.5, -2.0, 3.0]  # of groups 0, 0, 1, 1, 2, 2


def row(index: int, reward: Any, **fields: Any) -> dict[str, Any]:
    arrays = {"loss_mask": np.array([1, 0, 1]), "weight_versions": np.array([4, 4, 5])}
    return sample(index, reward, 3) | {"prompt": f"question {index}"} | arrays | fields


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with rollouts 0 and 1 (the second one trained on), and an evaluation of step 2."""
    folder = tmp_path / "runs" / "mine"
    writer = RolloutWriter(folder)
    writer.write(0, 1, [row(0, 0.0)])
    path = writer.write(1, 1, [row(10 + i, reward, group_index=i // 2) for i, reward in enumerate(REWARDS)])
    writer.write_trained(path, [{"line": 2, "advantage": -0.5, "mismatch": 1.5e-4, "num_trained": 2}])
    writer.write(2, 1, [row(0, {"acc": 1.0, "style": 0.25})], kind="eval-gsm8k")
    (folder / "eval").mkdir()
    (folder / "eval" / "2.json").write_text(json.dumps({"sets": {"gsm8k": {"settings": {"reward_key": "acc"}}}}))
    (folder / "config.json").write_text(json.dumps({"reward": {"reward_key": None}}))
    return folder


def show(capsys: Capsys, *args: Any, code: int = 0) -> str:
    assert cli.main(["show", *map(str, args)]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def indices(capsys: Capsys, *args: Any) -> list[int]:
    return [record["index"] for record in records(show(capsys, *args, "--json"))]


def test_the_last_step_with_all_that_is_known_of_a_sample(run: Path, capsys: Capsys) -> None:
    text = show(capsys, run)
    assert f"{run}: step 2 (rollouts/step_000002.train.a1.jsonl)" in text
    assert "6 samples in 3 groups; mean reward 0.5 (-2 to 3); groups with equal rewards: 1" in text
    RolloutWriter(run).write(8, 1, [row(0, 1.0)])
    assert "1 sample in 1 group;" in show(capsys, run, "--step", 9)
    assert (
        "\nsample 12  group 1  reward 0.5  advantage -0.5  mismatch 0.00015  3 tokens, 2 trained on  completed"
        "  weights 4 to 5\n  prompt   question 12\n  answer   answer 12\n  label    12\n"
    ) in text
    assert text.count("advantage") == 1, "of the sample that was trained on"
    assert "5 of 6: -n 0 shows all" in text and "\x1b" not in text


def test_order_and_choice(run: Path, capsys: Capsys) -> None:
    chosen = {"": [10, 11, 12, 13, 14], "-n 0": [10, 11, 12, 13, 14, 15], "--sample 13": [13], "--step 1": [0]}
    chosen |= {"--worst -n 2": [14, 10], "--best -n 3": [15, 11, 12]}
    chosen |= {"--all-equal": [12]}  # one of the group whose rewards are 0.5
    assert {flags: indices(capsys, run, *flags.split()) for flags in chosen} == chosen


def test_one_sample_in_full_with_its_group(run: Path, capsys: Capsys) -> None:
    RolloutWriter(run).write(2, 1, [row(0, 1.0, response="a" * 5000 + "END", metadata={"k": [1]}), row(1, 1.0)])
    text = show(capsys, run, "--sample", 0)
    assert "a" * 5000 + "END" in text and 'metadata {"k": [1]}' in text
    assert "group 0, sample: reward (all equal)\n  0: 1, 1: 1" in text
    assert "[… 4,403 characters cut …]" in show(capsys, run), "600 of 5,003 are shown"
    assert "[… 4,993 characters cut …]" in show(capsys, run, "--chars", 10)
    assert "a" * 5000 in show(capsys, run, "--chars", 0)


def test_evaluations(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    text = show(capsys, run, "--eval", "gsm8k")
    assert "evaluation gsm8k at step 2" in text and "reward 1 " in text
    assert 'rewards  {"acc": 1.0, "style": 0.25}' in text
    for name, code, shown in (("a", 0, "evaluation a at step 0"), ("b", 2, "choose one with --eval: a, b")):
        RolloutWriter(tmp_path).write(0, 1, [row(0, 1.0)], kind=f"eval-{name}")
        assert shown in show(capsys, tmp_path, code=code), "a run of evaluations alone"


@pytest.mark.parametrize("command", ["show", "view"])
def test_a_folder_of_runs_stands_for_its_newest(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    """The quickstart's folder has a model and several runs, none of them under runs/ itself."""
    monkeypatch.chdir(tmp_path)
    for age, name in ((200, "quickstart-1/sft"), (100, "quickstart-1/grpo"), (300, "older")):
        run = Path("runs", name)
        RolloutWriter(run).write(0, 1, [row(age, 1.0)])
        for path in (run, run / "rollouts"):
            os.utime(path, (path.stat().st_mtime - age,) * 2)
    Path("runs/quickstart-1/model").mkdir()
    Path("runs/quickstart-1/model/config.json").write_text("{}")
    for arguments in ([], ["runs/quickstart-1"], ["quickstart-1"]):
        assert cli.main([command, *arguments, "--step", "1"]) == 0
        shown = capsys.readouterr()
        assert "runs/quickstart-1/grpo" in shown.out
        assert shown.err == "runs/quickstart-1 has 2 runs: sft, grpo; the newest is taken\n"
    assert cli.main([command, "older", "--step", "1"]) == 0 and not capsys.readouterr().err
    assert "there are older, quickstart-1/sft, quickstart-1/grpo" in show(capsys, "other", code=2)
    RolloutWriter(Path("runs/newer")).write(0, 1, [row(77, 1.0)])
    RolloutWriter(Path("runs/newer/its-evaluation")).write(0, 1, [row(78, 1.0)])
    assert indices(capsys) == [77], "a run under runs/ itself, and none within it"


def test_mistakes(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    RolloutWriter(run).write(6, 1, [row(0, 0.0)])
    (tmp_path / "empty").mkdir()
    for words, said in {
        f"{run} --step 4": f"--step 4: {run} has samples of steps 1-2, 7",
        f"{run} --step 2 --sample 99": "--sample 99: no sample of step 2 has this index; they have the indices 10 to",
        f"{run} -n -1": "-n -1 must be 0 or more",
        f"{run} --chars -1": "--chars -1 must be 0 or more",
        f"{run} --eval math": "it has gsm8k",
        f"{tmp_path}/empty": "no rollout is finished yet",
    }.items():
        assert said in show(capsys, *words.split(), code=2)


def test_escapes_in_a_sample_do_not_reach_the_terminal(run: Path, capsys: Capsys) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\b\u202egnp.exe\ud800\x00 ok\n\tnext 数学 e\u0301 👩‍🚀"
    fields = dict.fromkeys(("prompt", "response", "label", "status"), evil)
    RolloutWriter(run).write(2, 1, [row(3, 1.0, metadata={evil: evil}, **fields)])
    for args in ([], ["--sample", 3], ["--json"]):
        text = show(capsys, run, *args)
        assert not set(text) & set("\x1b\x07\x9b\r\b\x00\u202e\ud800"), args
    (record,) = records(show(capsys, run, "--json"))
    assert record["response"] == evil, "whole, for a program"
    text = show(capsys, run)
    assert "answer   \\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\r\\x08\\u202egnp.exe\\ud800\\x00 ok\n" in text
    assert "\n           \tnext 数学 e\u0301 👩‍🚀\n" in text, "further lines are indented"


def test_a_torn_file_is_read_as_far_as_it_goes(run: Path, capsys: Capsys) -> None:
    for folder in ("rollouts", "rollouts/trained"):
        path = run / folder / "step_000002.train.a1.jsonl"
        whole = path.read_bytes()
        path.write_bytes(whole + whole.splitlines()[-1][:25])
    text = show(capsys, run, "-n", 0)
    assert "6 samples in 3 groups" in text and "cannot be read, and are left out: 1" in text
    assert "advantage -0.5" in text


@pytest.mark.timed
def test_big_files_are_streamed(tmp_path: Path) -> None:
    """48 samples of 40,000 tokens, some 40 MB: shown in seconds, with the memory of a few samples."""
    rng, n = np.random.default_rng(0), 40_000
    fields = {"loss_mask": np.ones(n, np.int32), "weight_versions": np.zeros(n, np.int32), "response": "word " * n}

    def values() -> dict[str, Any]:
        return {"tokens": rng.integers(0, 150_000, n), "rollout_log_probs": -rng.random(n).astype(np.float32)}

    rows = (row(i, float(i % 7), response_length=n, **fields, **values()) for i in range(48))
    path = RolloutWriter(tmp_path).write(0, 1, rows)
    assert path.stat().st_size > 35e6
    code = (
        "import sys, time; from fusionrl import cli; before = time.perf_counter();"
        f"cli.main(['show', {str(tmp_path)!r}, '--best', '-n', '1']); after = time.perf_counter();"
        # Not ru_maxrss, which begins with the size of the process that started this one.
        "peak = open('/proc/self/status').read().split('VmHWM:')[1].split()[0];"
        "print(); print(after - before, peak)"
    )
    shown = run_code(code)
    seconds, kib = map(float, shown.split()[-2:])
    assert "sample 6 " in shown and "reward 6 " in shown
    assert seconds < 5 and kib < 250_000, (seconds, kib)


def test_colour_only_on_a_terminal_that_wants_it(run: Path, capsys: Capsys, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for no_color, term, colored in (("", "xterm", True), ("1", "xterm", False), ("", "dumb", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("TERM", term)
        assert ("\x1b[1msample 10" in show(capsys, run)) == colored
        assert "\x1b" not in show(capsys, run, "--json")


def test_the_table_of_a_step() -> None:
    shown = [
        Glimpse(0, "question " * 40, "think\nso it is 42", "42", 1.0, 12, "completed"),
        Glimpse(11, "数学" * 60, "\x1b[31m" + "答" * 90, "a long label that goes on", -0.25, 4096, "truncated"),
        Glimpse(None, "", "", None, 0.0, 0, "failed"),
    ]
    for width in (80, 120, 200):
        table = sample_table(shown, 3, width)
        title, *lines = table.splitlines()
        assert title.startswith("step 3: 3 samples") and len(lines) == 4 and "\x1b" not in table
        assert max(map(cell_len, lines)) <= width
        assert "so it is 42" in lines[1] and lines[1].rstrip().endswith("question")
        assert "4096+" in lines[2] and lines[2].count("答") > 5, "the end of the answer"
        assert "0!" in lines[3]


def test_a_prompt_as_text() -> None:
    """Also of a tool conversation, whose assistant says nothing, and of a value that JSON cannot write."""
    loop: list[object] = []
    loop.append(loop)
    messages = [{"role": "user", "content": "4?"}, {"role": "assistant", "tool_calls": []}]
    assert [as_text(value) for value in ("a", messages, [{"content": "5"}], {"a": 1}, {(1,): 2}, loop)] == [
        "a",
        "user: 4?\nassistant: ",
        ": 5",
        '{"a": 1}',
        "{(1,): 2}",
        "[[...]]",
    ]
