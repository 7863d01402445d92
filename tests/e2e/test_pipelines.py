"""Whole runs in which generation runs ahead: the bound holds, and a run that goes on loses and doubles no prompt."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.deaths import kill_and_check, writer_of
from tests.e2e.launch import Launched, launch, metrics_of, run, trained_prompts
from tools.rescoring import checkpoint_versions, rescore, saved_samples

pytestmark = pytest.mark.e2e
NOT_THERE = "rank 1 (stopped by a signal) did not arrive"  # as the watchdog says
# A function for whole batches, as slime's users write them: a worker that always has groups under way.
WORKER = ["--rollout-function-path", "tests/e2e/slime_batches.py:generate_rollout_continuously"]
# Answers that take the engines longer than a step takes the trainer: then some are under way at a push.
LONG_ANSWERS = ["--rollout-max-response-len", "96", "--admission-lead", "2", "--sglang-max-running-requests", "2"]


def loses_an_engine(flags: list[str], folder: Path, tmp_path: Path) -> None:
    """Run with two engines, and kill one of them after a step or two; it comes back with the weights of a push."""
    flags += ["--rollout-num-gpus", "2", "--use-fault-tolerance", "--rollout-health-check-interval", "2"]
    with launch(flags, tmp_path) as launched:
        launched.wait_for(lambda: max((row["step"] for row in metrics_of(folder)), default=0) >= 4)
        (server,) = launched.find(r"^\S+ -m fusionrl\.engines\.launch_server .*--random-seed 43 ")
        os.kill(server, signal.SIGKILL)
        assert launched.wait(300) == 0, launched.output()[-3000:]
    assert "engine 1 is dead" in launched.output()


def _stops_a_rank(launched: Launched, folder: Path) -> bool:
    """After the second checkpoint one of two ranks is stopped; return whether the watchdog has said so."""
    if (folder / "checkpoints" / "step_000002" / "manifest.json").is_file():
        os.kill(writer_of(folder / "logs" / "trainer-1.a1.log"), signal.SIGSTOP)
    return NOT_THERE in launched.output()


@pytest.mark.parametrize(
    ("pipeline", "bound", "flags", "at_first", "then"),
    [
        ("async-partial", 2, ["--update-weight-transport", "broadcast", *LONG_ANSWERS], [], []),
        (
            "async",
            1,
            ["--max-staleness", "1", "--update-weight-transport", "disk", "--actor-num-gpus-per-node", "2"],
            [],
            WORKER,
        ),
        ("stream", 0, ["--update-weights-interval", "4"], ["--colocate"], []),
    ],
)
def test_a_pipeline(
    rl_flags: list[str],
    task: Path,
    tmp_path: Path,
    pipeline: str,
    bound: int,
    flags: list[str],
    at_first: list[str],
    then: list[str],
) -> None:
    """`at_first`: flags before the run ends in its middle; `then`: of the part that goes on."""
    folder = tmp_path / "run"
    given = [*rl_flags, "--pipeline", pipeline, *flags, "--run-dir", str(folder), "--save-interval", "1"]
    given += ["--verify-checkpoints"]
    if pipeline == "async":  # of two trainers, one dies
        first = launch([*given, *at_first, "--num-rollout", "8", "--stall-warn-s", "0.5"], tmp_path)
        stalls = partial(_stops_a_rank, first, folder)
        kill_and_check(first, folder, stalls, "trainer-1.a1.log", "trainer rank 1 died: its process ")
        line = next(line for line in first.output().splitlines() if NOT_THERE in line)
        # It is stopped in a training step or, on some machines, in the push after it.
        assert re.search(r"waits for trainer(s 0-1| rank)", line) and "trainer-1 is stopped by a signal (pid " in line
        assert "rank 0 waits in " in line
        (file,) = re.findall(r"stacks in (\S+)", line)
        assert "=== driver" in Path(file).read_text() and "=== trainer-0: process" in Path(file).read_text()
    else:
        run([*given, *at_first, "--num-rollout", "2"], tmp_path)  # of `stream` in the middle of a version
    given += [*then, "--num-rollout", "8", "--resume"]
    if pipeline == "async-partial":
        loses_an_engine(given, folder, tmp_path)
    else:
        run(given, tmp_path)
    rows = [row for row in metrics_of(folder) if "train/loss" in row]
    assert sorted({row["step"] for row in rows}) == list(range(1, 9))
    ages = [row["rollout/staleness/token_max"] for row in rows]
    interval = 4 if pipeline == "stream" else 1
    assert max(ages) <= bound * interval and (bound == 0 or max(ages) >= 1)
    prompts = trained_prompts(folder)
    assert len(prompts) == len(set(prompts)) == 8 * 8
    # The loss corrects for them by default, and the numbers tell what became of the tokens.
    assert all("train/is_ratio" in row for row in rows)
    died = next((row for row in reversed(rows) if row["attempt"] == 1), None)  # the last step before a trainer died
    of_worker = [row["attempt"] == 2 and then == WORKER for row in rows]  # which draws more than is trained in the end
    for row, is_drawn_ahead in zip(rows, of_worker, strict=True):
        assert row["pipeline/tokens_trained"] <= row["rollout/num_tokens"]
        assert row["pipeline/tokens_dropped"] == 0 or is_drawn_ahead
        assert row["rollout/steps_since_sampled/max"] >= row["rollout/staleness/token_max"]
        idle = [row[name] for name in ("perf/engines_idle", "perf/trainers_idle") if name in row]
        assert max(idle) <= 1 and min(idle) >= 0
        assert len(idle) == 2 or row is died, "only a step whose push failed lacks it"
        assert row["pipeline/tokens_prefilled_again"] == 0 or is_drawn_ahead or pipeline == "async-partial"
    assert rows[-1]["pipeline/length_trained_by_offered"] == pytest.approx(1.0, abs=0.2)
    # Of a token that is not stale, the engine's log-prob is the trainer's; a step may have stale ones alone.
    gaps = [row["train/logprob_diff_max"] for row in rows if "train/logprob_diff_max" in row]
    assert gaps and max(gaps) < 1e-4
    if pipeline == "async-partial":  # every token is of the version that it claims; tools/pipeline_matrix.py has more
        found = rescore(saved_samples(folder), checkpoint_versions(folder, task / "model"), max_staleness=bound)
        assert found.told() == [] and found.samples == 8 * 8 * 4
        assert found.stale_tokens > 0 and found.spanning > 0
        assert sum(row["pipeline/tokens_prefilled_again"] for row in rows) > 0
