"""`fusionrl view`: what the page holds, under its limit of bytes, and one sample in the terminal."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fusionrl.observe.view.run_block as series_module
from fusionrl import cli
from fusionrl.observe.metrics import MetricsSink, read_metrics
from fusionrl.observe.rollouts import RolloutWriter, list_rollouts
from fusionrl.observe.show import Samples
from fusionrl.observe.view.command import render_tokens, token_texts
from fusionrl.observe.view.run_block import (
    Series,
    Vocabulary,
    choose_files,
    find_spikes,
    notable_steps,
    read_rows,
    series_of,
)
from fusionrl.observe.view.step_block import by_interest, pack, page_row
from tests.observe.view_runs import sample, trained, unpack, write_run, write_tokenizer

Capsys = pytest.CaptureFixture[str]

MB = 1_000_000


def view(capsys: Capsys, *args: Any, code: int = 0) -> str:
    assert cli.main(["view", *map(str, args)]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def blocks_of(path: Path) -> dict[str, Any]:
    """The data of a page, unpacked."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r'<script type="application/octet-stream" id="([\w-]+)">([^<]*)</script>', text)
    return {name: unpack(data) for name, data in found}


def facts_of(run: Path) -> dict[str, Any]:
    """What the page of a run says of it."""
    return dict(blocks_of(run / "view.html")["main"]["runs"][0])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of one sample of nine tokens."""
    return write_run(tmp_path / "run", [[sample(0, length=9)]], write_tokenizer(tmp_path / "model"))


def test_what_is_packed_is_unpacked() -> None:
    """An integer that a script would round is text."""
    value = {1: [2**70, -(2**70), True], "half a pair \ud800": ["\udfff", "</script><!--"], "c": (2**53, 0.5, None)}
    unpacked = {"1": [str(2**70), str(-(2**70)), True], "half a pair \ud800": value["half a pair \ud800"]}
    assert unpack(pack(value)) == unpacked | {"c": [2**53, 0.5, None]} and "<" not in pack(value)


def test_spikes_stand_out_from_their_neighbours() -> None:
    rng = np.random.default_rng(0)
    calm = list(rng.normal(0, 1, 200))
    assert find_spikes(calm) == []
    assert find_spikes([*calm[:70], 40.0, *calm[70:120], -90.0, *calm[120:]]) == [121, 70], "the largest first"
    gaps: list[float | None] = [*calm[:100], None, None, 50.0, *calm[100:]]
    assert find_spikes(gaps) == [102]
    assert find_spikes([1.0] * 50) == [] and find_spikes([0.0, 9.0, 0.0]) == []
    slope = [float(i) for i in range(100)]
    assert find_spikes(slope) == [], "a metric that only grows does not jump"
    assert find_spikes([*slope[:50], 500.0, *slope[50:]]) == [50]


def test_metrics_in_columns_with_gaps_and_no_numbers(tmp_path: Path) -> None:
    with MetricsSink(tmp_path, 1) as sink:
        sink.log(1, {"a": 1.23456789, "text": "x"})
        sink.log(2, {"a": math.nan, "b": True})
        sink.log(3, {"b": 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "att')  # a run that writes just now, or was killed
    series = series_of(read_rows(tmp_path))
    assert series.steps == [1, 2, 3]
    assert series.values == {"a": [1.23457, None, None], "b": [None, 1, 2]}
    assert series.nonfinite == {"a": [1]} and notable_steps(series) == [2]
    assert series_of(read_rows(tmp_path / "none")) == Series()
    series = series_of(read_rows(tmp_path), 2)
    assert (series.steps, series.num_left_out) == ([1, 3], 1), "the last step is always there"


def test_columns_of_a_sample() -> None:
    row = json.loads(json.dumps(sample(0, length=3), default=lambda value: value.tolist()))
    row |= {"loss_mask": [1, 0, 1], "rollout_log_probs": [-1.0, -0.5, None], "weight_versions": [3, 3, 3]}
    found = page_row(row, {"log_probs": [-1.25, None, -2.0], "entropy": [0.1, 0.2, 0.3], "advantages": [2.0] * 3}, 3)
    expected = {"tokens": row["tokens"][3:], "prompt_tokens": row["tokens"][:3], "mask": [1, 0, 1]}
    expected |= {"version": 3, "advantage": 2.0}  # a value of all tokens is written once
    expected |= {"engine": [-1.0, -0.5, None], "gap": [-0.25, None, None], "entropy": [0.1, 0.2, 0.3]}
    assert {name: found[name] for name in expected} == expected
    assert not {"gap", "entropy", "advantage"} & page_row(row, {}, 3).keys(), "without trainers' values"


def test_fields_of_another_kind_are_left_out() -> None:
    """A user's function may write anything."""
    row = {"tokens": "none", "loss_mask": [1], "rollout_log_probs": {"a": 1}, "prompt": {"x": "y" * 200_000}}
    found = page_row(row, {"entropy": ["a"]}, 1)
    assert "tokens" not in found and "engine" not in found and "entropy" not in found and found["mask"] == 1
    assert found["prompt"] == "(too large for this page)"
    assert "tokens" not in page_row({"tokens": [1.5, 2]}, {}, 1)


def test_the_most_telling_groups_come_first(tmp_path: Path) -> None:
    rewards = [1.0, 1.0, 0.5, 0.5, -3.0, -2.0, 4.0, 5.0, 0.0, 0.0]
    rows = [sample(i, reward, status="truncated" if i == 9 else "completed") for i, reward in enumerate(rewards)]
    run = write_run(tmp_path / "run", [rows])
    next((run / "rollouts" / "trained").iterdir()).unlink()
    (file,) = list_rollouts(run)
    RolloutWriter(run).write_trained(file.path, [trained(i, mismatch=5.0 if i == 2 else 0) for i in range(10)])
    order = [group[0].group for group in by_interest(Samples(file))]
    assert order == [1, 2, 3, 4, 0], "by mismatch, lowest, highest reward, cut off, the rest"


def test_a_page_holds_the_whole_of_a_small_run(tmp_path: Path, capsys: Capsys) -> None:
    tokenizer = write_tokenizer(tmp_path / "model")
    steps = [[sample(i, i / 4) for i in range(4)], [sample(i, 1.0) for i in range(4)]]
    run = write_run(tmp_path / "run", steps, tokenizer, train__loss=[0.5, 0.25])
    RolloutWriter(run).write(2, 1, [sample(0, {"acc": 1.0, "style": 0.5})], kind="eval-held-out")
    (run / "eval").mkdir()
    (run / "eval" / "2.json").write_text(json.dumps({"sets": {"held-out": {"settings": {"reward_key": "acc"}}}}))
    said = view(capsys, run)
    assert f"{run / 'view.html'}: " in said and "9 of 9 samples with texts" in said and "left out" not in said
    facts = facts_of(run)
    assert facts["steps"] == [1, 2] and facts["metrics"]["train/loss"] == [0.5, 0.25]
    first, second, evaluation = files = facts["files"]
    shapes = [(file["step"], file["kind"], file["samples"]) for file in files]
    assert shapes == [(1, "train", 4), (2, "train", 4), (2, "eval-held-out", 1)]
    assert (first["equal"], second["equal"], first["mismatch"]) == (0, 2, 0.04)
    assert evaluation["reward"] == 1.0, "by the key of the evaluation"
    repeats = sorted(facts["repeats"].values())
    assert repeats == [[[0, 0], [1, 0], [2, 0]], [[0, 2], [1, 2]]], "prompts that came again: their files and lines"
    block = blocks_of(run / "view.html")[first["block"]]
    assert block["samples"]["reward"] == [0, 0.25, 0.5, 0.75] and set(block["rows"]) == {"0", "1", "2", "3"}
    assert block["rows"]["3"]["response"] == "answer 3" and len(block["rows"]["3"]["gap"]) == 4
    used = {str(token) for one in block["rows"].values() for token in one["tokens"]}
    assert used <= facts["vocabulary"].keys()


def test_no_text_of_a_run_leaves_its_data(tmp_path: Path, capsys: Capsys) -> None:
    evil = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>"
    run = write_run(tmp_path / "a<b>&c", [[sample(0, prompt=evil, response=evil)]])
    view(capsys, run, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "onerror" not in text and "a<b>" not in text and "<title>a&lt;b&gt;&amp;c" in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and policy[1].startswith("default-src 'none'; script-src 'sha256-")


def test_the_limit_holds_and_what_is_left_out_is_said(tmp_path: Path, capsys: Capsys) -> None:
    rng = np.random.default_rng(0)
    seeds = [range(100 * step, 100 * step + 12) for step in range(8)]
    steps = [
        [sample(seed % 100, length=400, response=rng.bytes(500).hex(), seed=seed) for seed in one] for one in seeds
    ]
    run = write_run(tmp_path / "run", steps)
    said = view(capsys, run, "--mb", "0.7")
    assert (run / "view.html").stat().st_size <= 0.7 * MB
    facts = facts_of(run)
    kept = [file["kept"] for file in facts["files"] if file["block"]]
    assert kept and all(0 < count < 12 for count in kept), "fewer samples of each step, the numbers of all"
    assert "left out" in said and all(one in said for one in facts["left_out"])
    assert any("texts and tokens of" in one for one in facts["left_out"])
    said = view(capsys, run, "--mb", "0.7", "--steps", "3")
    only = facts_of(run)["files"]
    assert [file["step"] for file in only if file["block"]] == [3] and only[2]["kept"] > max(kept)
    assert "samples of 7 steps (1-2, 4-8)" in said


def test_of_too_many_steps_those_at_jumps_are_chosen(tmp_path: Path) -> None:
    values = [1.0 + 0.01 * (i % 3) for i in range(100)]
    values[41] = 50.0
    run = write_run(tmp_path / "run", [[sample(0)] for _ in range(100)], train__loss=values)
    files = list_rollouts(run)
    chosen = sorted(file.step for file in choose_files(files, series_of(read_rows(run)), 10))
    assert len(chosen) == 10 and {1, 42, 100} <= set(chosen)
    assert max(np.diff(chosen)) < 40, "the others lie evenly over the run"
    assert len(choose_files(files, Series(), 1)) == 1 and len(choose_files(files, Series(), 200)) == 100


def test_a_file_that_is_cut_off(tmp_path: Path, capsys: Capsys) -> None:
    """A copy of a run that was still going, or a full disk."""
    run = write_run(tmp_path / "run", [[sample(i) for i in range(4)]])
    for path in (*(run / "rollouts").glob("*.jsonl"), *(run / "rollouts" / "trained").iterdir(), run / "metrics.jsonl"):
        content = path.read_bytes()
        path.write_bytes(content[: -len(content.splitlines()[-1]) // 2])
    view(capsys, run)
    block = blocks_of(run / "view.html")["run0-0"]
    assert block["unreadable"] == 1 and set(block["rows"]) == {"0", "1", "2"} and "gap" in block["rows"]["2"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--steps 5-9", "has samples of steps 1"),
        ("--steps 9-5", "--steps 9-5"),
        ("--mb 0.1", "--mb 0.1"),
        ("--html no/page.html", "cannot be written"),
        ("--step 1 --sample 7", "no sample of step 1 has this index"),
        ("--by mask", "--by cannot be used with a page"),
        ("--step 1 --html x.html", "--html cannot be used with --step"),
        ("--eval a --serve", "--serve cannot be used with --eval"),
        ("--serve --html x.html --mb 3", "--html and --mb cannot be used with --serve"),
        ("--tokenizer none", "--tokenizer none: none/tokenizer.json is missing"),
        ("--tokenizer none --serve", "name a folder with a tokenizer.json"),
    ],
)
def test_mistakes(flags: str, said: str, run: Path, capsys: Capsys) -> None:
    assert said in view(capsys, run, *flags.split(), code=2)


def test_mistakes_in_the_run(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    assert "is no run folder" in view(capsys, tmp_path / "none", code=2)
    (tmp_path / "empty").mkdir()
    assert "neither metrics nor samples" in view(capsys, tmp_path / "empty", code=2)
    assert "show one run" in view(capsys, run, run, "--step", 1, code=2)


def test_text_of_tokens_is_that_of_the_library(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = ["Grüße, 世界! naïve café\n\n  x = 1", "🙂🙃 emoji", "plain words again and again"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<|end|>"]}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, **alphabet))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary: Any = Vocabulary.read(tmp_path / "tokenizer.json")
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert "".join(token_texts(ids, vocabulary)) == text
        pieces = "".join(piece for i in ids for piece in vocabulary.pieces([i]).values())
        assert pieces.encode("latin-1").decode() == text
    assert token_texts([0, 999], vocabulary) == ["<|end|>", "[999]"]


def test_other_vocabularies_and_none(tmp_path: Path) -> None:
    content: dict[str, Any] = {"model": {"vocab": [["<unk>", 0], ["▁the", -1], ["<0xC3>", -2], ["<0xA4>", -3]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    vocabulary = Vocabulary.read(tmp_path / "tokenizer.json")
    assert token_texts([1, 2, 3, 2], vocabulary) == [" the", "", "ä", "\ufffd"], "half a character at the end"
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    assert Vocabulary.read(tmp_path / "tokenizer.json") is None and Vocabulary.read(tmp_path / "none") is None
    assert token_texts([1, 2], None) == ["[1]", "[2]"] and token_texts([], None) == []


def test_one_sample_in_the_terminal(tmp_path: Path, capsys: Capsys) -> None:
    tokenizer = write_tokenizer(tmp_path / "model")
    rows = [sample(0), sample(1, length=5, tokens=[10, 10, 10, 0, 14, 12, 13, 15], loss_mask=[1, 1, 0, 1, 1])]
    run = write_run(tmp_path / "run", [rows], tokenizer)
    text = view(capsys, run, "--step", 1, "--sample", 1, "--by", "entropy")
    assert "sample 1  group 0  reward 0.5  advantage +0.25" in text and "prompt   question 0" in text
    assert "5 tokens by entropy: entropy of the trainer's distribution, nats" in text
    assert "\natheä<|end|>\n" in text and "\x1b" not in text
    table = text[text.index("token  ") :].splitlines()
    names = ["token", "engine", "gap", "entropy", "advantage", "version", "mask", "text"]
    assert table[0].split() == names and len(table) == 6
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    assert "[10]" not in text and "[14]" in view(capsys, run, "--sample", 1, "--tokenizer", tmp_path)


def test_a_response_that_is_cut_says_so(run: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is cut" not in view(capsys, run, "--sample", 0)
    monkeypatch.setattr("fusionrl.observe.view.step_block.MOST_TOKENS", 4)
    assert "the first 4 of 9 tokens" in view(capsys, run, "--sample", 0)
    view(capsys, run)
    row = blocks_of(run / "view.html")["run0-0"]["rows"]["0"]
    assert len(row["tokens"]) == 4 and row["num_tokens"] == 9, "by these the page says it"


def test_metrics_over_the_limit(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many metrics some steps are left out; the samples still have room."""
    run = write_run(tmp_path / "run", [[sample(i) for i in range(4)]])
    rows = np.random.default_rng(0).normal(size=(800, 100)).round(6).tolist()
    with (run / "metrics.jsonl").open("w") as file:
        for step, values in enumerate(rows, start=1):
            named = {f"train/metric_{i}": value for i, value in enumerate(values)}
            file.write(json.dumps({"step": step, "attempt": 1} | named) + "\n")
    reads = []
    monkeypatch.setattr(series_module, "read_metrics", lambda run: reads.append(run) or read_metrics(run))
    said = view(capsys, run, "--mb", 0.8)
    assert len(reads) == 1, "a live run may add lines between two reads"
    assert (run / "view.html").stat().st_size <= 0.8 * MB and "4 of 4 samples" in said
    facts = facts_of(run)
    assert 20 < len(facts["steps"]) < 700 and facts["steps"][-1] == 800 and "metrics of" in said


def test_a_limit_below_what_a_run_needs_names_the_smallest(run: Path, capsys: Capsys) -> None:
    text = np.random.default_rng(0).bytes(300_000).hex()
    config = json.loads((run / "config.json").read_text()) | {"custom": {"text": text}}
    (run / "config.json").write_text(json.dumps(config))
    said = view(capsys, run, "--mb", 0.5, code=2)
    least = re.search(r"give at least --mb ([\d.]+)", said)
    assert least is not None and not (run / "view.html").exists()
    view(capsys, run, "--mb", least[1])
    assert (run / "view.html").stat().st_size <= float(least[1]) * MB


def test_colours_of_the_terminal(tmp_path: Path) -> None:
    vocabulary = Vocabulary.read(write_tokenizer(tmp_path) / "tokenizer.json")
    row: dict[str, object] = {"tokens": [0, 1, 2, 11], "gap": [0.0, -1.0, 0.5, None]}
    row |= {"mask": [1, 1, 1, 0], "version": [1, 1, 2, 2]}

    def line(row: dict[str, object], by: str, vocabulary: Any = vocabulary, colored: bool = True) -> str:
        return list(render_tokens(row, by, vocabulary, colored))[1]

    assert line(row, "mismatch") == "a\x1b[48;5;160mb\x1b[0m\x1b[48;5;34mc\x1b[0m\x1b[38;5;245m\n\x1b[0m"
    healthy: dict[str, object] = {"tokens": [0, 1], "gap": [5e-6, -2e-6], "mask": [1, 1]}
    assert line(healthy, "mismatch") == "ab", "rounding has no colour"
    assert line(row, "version").count("\x1b[48;5;24m") == 2 and "--save-token-values" in line(row, "entropy")
    assert line(row | {"mask": [0, 0, 1, 0]}, "mask", colored=False) == "[-ab-]c[-\n-]"
    assert line({"tokens": [0]}, "mask", Vocabulary({0: "\x1b[31m"}, {}, False), False) == "\\x1b[31m"


def test_the_pure_part_of_the_script() -> None:
    if (node := shutil.which("node") or shutil.which("nodejs")) is None:
        pytest.skip("there is no node here")
    script = Path(__file__).with_name("view_core.js")
    done = subprocess.run([node, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
