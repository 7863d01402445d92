"""The whole loop with real engines, router and trainers: two of each, both placements, both ways of weight push.

Then functions written for slime; a rollout function of its kind: test_security.py.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from fusionrl.observe.metrics import read_lines
from fusionrl.observe.timeline.command import record_faults
from fusionrl.observe.timeline.records import read_attempt, steps_of
from fusionrl.observe.timeline.report import driver_shares, pools
from fusionrl.observe.timeline.trace_file import build
from fusionrl.observe.view.command import column_of, token_texts
from fusionrl.observe.view.run_block import build_run, vocabulary_of
from tests.e2e.launch import metrics_of, printed_by, run, samples_of_step, undocumented_files
from tests.observe.trace_format import faults
from tests.observe.view_runs import unpack

pytestmark = pytest.mark.e2e

PLACEMENTS = {
    "apart-broadcast": (
        "broadcast",
        ["--rollout-num-gpus", "2", "--expert-model-parallel-size", "2", "--pause-generation-mode", "in_place"]
        + ["--bitwise"],
    ),
    "colocated-ipc": ("ipc", ["--colocate", "--offload-train", "always"]),
}


@pytest.mark.parametrize("placement", ["apart-broadcast", pytest.param("colocated-ipc", marks=pytest.mark.cold)])
def test_rl(placement: str, task: Path, experts: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """Two trainers and two engines: every push is confirmed, every token is stamped, the files are all there.

    Trainers apart from the engines divide the experts of a mixture, and compute the same bits as these (--bitwise).
    The colocated run has model, data and its own folder in one with spaces and a letter such as ï, a temporary folder
    that is too long for sockets, and no home.
    """
    transport, flags = PLACEMENTS[placement]
    folder, env = tmp_path / "run", dict[str, str]()
    if placement == "apart-broadcast":
        flags = [*flags, "--hf-checkpoint", str(experts)]
    if placement == "colocated-ipc":
        odd = tmp_path / "ein ï, und (mehr)"
        rl_flags = [flag.replace(str(task), str(odd / "task")) for flag in rl_flags]
        task = Path(shutil.copytree(task, odd / "task"))
        folder, temporary = odd / "r un", odd / ("long-" * 20)
        temporary.mkdir()
        env = {"TMPDIR": str(temporary), "HOME": str(tmp_path / "none" / "here")}
    evaluation = ["--eval-interval", "2", "--eval-prompt-data", "held-out", str(task / "eval.jsonl")]
    launched = run(
        [*rl_flags, *flags, *evaluation, "--actor-num-gpus-per-node", "2", "--num-rollout", "3"]
        + ["--verify-weights", "always", "--run-dir", str(folder), "--num-steps-per-rollout", "2"]
        + ["--save-interval", "1", "--keep-checkpoints", "1", "--keep-best", "eval/held-out/accuracy"]
        + [
            "--save-token-values",
            "--profile-steps",
            "2",
            "--peak-tflops",
            "0.05",
            "--save-hf",
            str(folder.with_name("h f")),
        ],
        tmp_path,
        **env,
    )
    assert (folder.with_name("h f") / "model.safetensors").is_file()
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert f"by {transport}" in (folder / "plan.txt").read_text()
    bound = 0.0 if "--bitwise" in flags else 1e-4
    for row in rows:
        assert row["sync/verify_logprob_diff"] <= bound
        assert row["sync/version"] == row["step"]
    for row in rows[1:]:
        assert row["train/logprob_diff_mean"] <= bound
        assert row["train/grad_norm"] > 0
        assert row["train/skipped"] == 0
    assert "eval/held-out/accuracy" in rows[0] and "eval/held-out/accuracy" in rows[2]
    for name in ("config.json", "plan.txt", "curves.png", "checkpoints/step_000003/manifest.json"):
        assert (folder / name).is_file(), name
    # Kept are the newest and the best; the last step is evaluated as well.
    accuracies = {row["step"]: row["eval/held-out/accuracy"] for row in rows[2:]}
    best = max(accuracies, key=lambda step: (accuracies[step], step))
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == sorted({f"step_{step:06d}" for step in (best, 3)})
    assert not undocumented_files(folder), "docs/reference/run-folder.md has no row for them"
    # Requests that keep their keys and values over a push would leave them in a prefix cache.
    is_cached = placement == "colocated-ipc"
    assert f"'disable_radix_cache': {not is_cached}" in (folder / "logs" / "engine-0.log").read_text()
    logs = {path.name for path in (folder / "logs").iterdir()}
    assert {"engine-0.log", "engine-1.log", "router.log", "driver.log"} <= logs
    for rollout_id in range(3):
        samples = samples_of_step(folder, rollout_id + 1)
        assert len(samples) == 32
        for sample in samples:
            assert set(sample["weight_versions"]) == {rollout_id}
            assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == sample["response_length"]
            assert 0 <= sample["reward"] <= 1
    _check_shown(folder, rows)
    _check_viewed(folder, rows)
    _check_timeline(folder)
    _check_hardware(folder, rows[1:])
    assert "step 3/3" in launched.output()
    api_key_shown = [
        path.name for path in (folder / "logs").iterdir() if "api_key='" in path.read_text(errors="replace")
    ]
    assert not api_key_shown


def _check_hardware(folder: Path, rows: list[dict]) -> None:
    """Host memory of every group of processes, and speeds of one device; on a CPU nothing of GPUs."""
    for row in rows:
        assert 0 < row["perf/mfu"] < 1
        assert row["perf/train_tokens_per_s_per_device"] > row["perf/tokens_per_s"] / 100
        assert row["perf/generate_tokens_per_s_per_device"] > 0
        groups = {name: row.get(f"hardware/host_bytes/{name}", 0.0) for name in ("trainers", "engines", "buffer")}
        assert all(100 << 20 < size < 100 << 30 for size in groups.values()), groups
        assert row["hardware/host_bytes/driver"] > 50 << 20 and row["hardware/host_bytes/ray"] > 10 << 20
        assert row["hardware/host_peak_bytes/trainers"] >= row["hardware/host_bytes/trainers"] / 2
        assert not any(name.startswith("hardware/utilisation") for name in row)
    written = json.loads((folder / "hardware.a1.json").read_text())
    assert [len(written[name]) for name in ("trainers", "engines")] == [2, 2]
    assert all(facts["pid"] and facts["gpus"] == [] for facts in written["engines"])


def _check_timeline(folder: Path) -> None:
    """The file keeps the format's rules, clocks of all processes agree within 5 ms, times are the metrics'."""
    recorded = read_attempt(folder, 1)
    assert set(recorded.machines) == {
        *("driver", "buffer", "trainer-0", "trainer-1", "engine-actor-0", "engine-actor-1")
    }
    by_step = steps_of(folder, recorded)
    assert {step: len(courses) for step, courses in by_step.items() if step} == dict.fromkeys((1, 2, 3), 32)
    trace = build(folder, recorded, by_step)
    assert faults(trace.events) == []
    spans = {event["name"] for event in trace.events if event["ph"] == "X"}
    assert {"wait", "turn", "reward", "forward", "backward", "optimizer", "gather", "cut", "save", "pause"} <= spans
    assert "aten::mm" in spans, "the profile of step 2"
    curves = {event["name"] for event in trace.events if event["ph"] == "C"}
    assert {"running", "queued", "kv_used", "at engines", "host memory"} <= curves
    last_stops = {event["id"]: event["pid"] for event in trace.events if event["ph"] == "f"}
    assert trace.pids["samples"] in last_stops.values(), "arrows lead to the first token of new weights"
    slack = 5_000  # µs: what a process does for the driver lies within the driver's phase
    for name in ("train", "push"):
        phases = recorded.of("driver", name)
        for process in ("trainer-0", "trainer-1"):
            for inner in recorded.of(process, name):
                assert any(p.start - slack <= inner.start and inner.end <= p.end + slack for p in phases), inner
    for one in recorded.of("buffer", "rollout"):
        phases = recorded.of("driver", "generate")
        assert any(p.start - slack <= one.start and one.end <= p.end + slack for p in phases), one
    lines = [line for line in read_lines(folder) if line.attempt == 1]
    assert sum("perf/step_time_s" in line.values for line in lines) == 3
    assert record_faults(recorded, lines) == []
    assert driver_shares(recorded, 0, recorded.end)["other"] <= 0.1 * recorded.end
    for pool in pools(recorded, *(recorded.of("driver", "step")[i].start for i in (0, -1))):
        assert 0 <= pool.idle <= pool.total and pool.busy > 0


def _check_shown(folder: Path, rows: list[dict]) -> None:
    """`fusionrl show` has an advantage and a mismatch of every sample, and they are those of the metrics."""
    for row in rows[1:]:
        shown = printed_by("show", folder, "--step", str(row["step"]), "-n", "0", "--json")
        records = [json.loads(line) for line in shown.splitlines()]
        assert len(records) == 32
        tokens = np.array([record["num_trained"] for record in records])
        mismatch = np.array([record["mismatch"] for record in records])
        advantages = np.array([record["advantage"] for record in records])
        assert row["train/num_tokens"] == tokens.sum() and mismatch.max() < 1e-4
        rewards = np.array([record["reward"] for record in records]).reshape(8, 4)
        centered = (rewards - rewards.mean(1, keepdims=True)).ravel()
        is_mean = np.abs(centered) < 1e-9  # a reward that equals its group's mean but for rounding
        assert (np.sign(advantages) == np.sign(centered))[~is_mean].all()
        assert (np.abs(advantages[is_mean]) < 1e-6).all()
    worst = printed_by("show", folder, "--worst", "-n", "1", "--eval", "held-out")
    assert "evaluation held-out at step 3" in worst and "advantage" not in worst


def _check_viewed(folder: Path, rows: list[dict]) -> None:
    """The page of `fusionrl view` has the trainers' values of every token, and the text of the engine from its ids."""
    block = build_run(folder, 0, 5_000_000)
    vocabulary = vocabulary_of(folder, "")
    kept, samples = (sum(file[name] for file in block.facts["files"]) for name in ("kept", "samples"))
    assert kept == samples >= 3 * 32, "and those of evaluations"
    for row in rows[1:]:
        file = next(one for one in block.facts["files"] if (one["step"], one["kind"]) == (row["step"], "train"))
        packed = unpack(block.blocks[file["block"]])
        entropies = []
        for line, mismatch in zip(packed["samples"]["line"], packed["samples"]["mismatch"], strict=True):
            sample = packed["rows"][str(line)]
            text = "".join(token_texts(sample["tokens"], vocabulary))
            assert sample["response"] == re.sub(r"<\|\w+\|>", "", text), "the engine's has no special tokens"
            assert np.abs(sample["gap"]).mean() == pytest.approx(mismatch, rel=0.02, abs=1e-9)
            entropies += column_of(sample, "entropy")
        assert np.mean(entropies) == pytest.approx(row["train/entropy"], rel=1e-3)
