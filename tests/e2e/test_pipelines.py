"""Whole runs in which generation runs ahead: the bound holds, and a run that goes on loses and doubles no prompt."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.deaths import kill_and_check, router_of, writer_of
from tests.e2e.launch import Launched, launch, metrics_of, run, train_steps, trained_prompts
from tools.family_loops import make_model
from tools.rescoring import checkpoint_versions, rescore, saved_samples

pytestmark = pytest.mark.e2e
NUM_STEPS = 6
NOT_THERE = "rank 1 (stopped by a signal) did not arrive"  # as the watchdog says
# A function for whole batches, as slime's users write them: a worker that always has groups under way.
WORKER = ["--rollout-function-path", "tests/e2e/slime_batches.py:generate_rollout_continuously"]
# Answers that take the engines longer than a step takes the trainer: then some are under way at a push.
LONG_ANSWERS = ["--rollout-max-response-len", "96", "--admission-lead", "2", "--sglang-max-running-requests", "2"]


def loses_an_engine(flags: list[str], folder: Path, tmp_path: Path) -> None:
    """Run with two engines, and after a step kill one of them, the Buffer and the router at once; all come back, the
    engine with the weights of a push."""
    flags += ["--rollout-num-gpus", "2", "--use-fault-tolerance", "--rollout-health-check-interval", "2"]
    with launch(flags, tmp_path) as launched:
        launched.wait_for(lambda: any(attempt == 2 for attempt, _ in train_steps(folder)))
        (server,) = launched.find(r"^\S+ -m fusionrl\.engines\.launch_server .*--random-seed 43 ")
        for pid in (writer_of(folder / "logs" / "buffer.a2.log"), router_of(launched), server):
            os.kill(pid, signal.SIGKILL)
        assert launched.wait() == 0, launched.output()[-3000:]
    assert "engine 1 is dead" in launched.output()
    last = metrics_of(folder)[-1]
    assert (last["run/restarts_router"], last["run/restarts_buffer"]) == (1, 1)


def _stops_a_rank(launched: Launched, folder: Path) -> bool:
    """After the second checkpoint one of two ranks is stopped; return whether the watchdog has said so."""
    if (folder / "checkpoints" / "step_000002" / "manifest.json").is_file():
        os.kill(writer_of(folder / "logs" / "trainer-1.a1.log"), signal.SIGSTOP)
    return NOT_THERE in launched.output()


def raises_in_a_reward(flags: list[str], folder: Path, tmp_path: Path) -> int:
    """Run until a reward raises while groups are under way, and return the trained steps, which are saved first.

    Samples from 96 on are admitted after the first push, and the fourth step needs them.
    """
    failed = run([*flags, "--num-rollout", str(NUM_STEPS)], tmp_path, code=1, FUSIONRL_TEST_SAMPLE="96").output()
    done = max(row["step"] for row in metrics_of(folder))
    assert 1 <= done < 4 and f"step_{done:06d} has all of it" in " ".join(failed.split()), failed[-3000:]
    return done


def stops_a_trainer(flags: list[str], folder: Path, tmp_path: Path) -> None:
    """Run with two trainers, of which one is stopped, which the watchdog says, and then dies."""
    ends = ["--save-interval", "1", "--num-rollout", "8", "--stall-warn-s", "0.5", "--max-restarts", "0"]
    first = launch([*flags, *ends], tmp_path)
    stalls = partial(_stops_a_rank, first, folder)
    kill_and_check(first, folder, stalls, "trainer-1.a1.log", "trainer rank 1 died: its process ")
    line = next(line for line in first.output().splitlines() if NOT_THERE in line)
    # It is stopped in a training step or, on some machines, in the push after it.
    assert re.search(r"waits for trainer(s 0-1| rank)", line) and "trainer-1 is stopped by a signal (pid " in line
    assert "rank 0 waits in " in line
    (file,) = re.findall(r"stacks in (\S+)", line)
    assert "=== driver" in Path(file).read_text() and "=== trainer-0: process" in Path(file).read_text()


@pytest.mark.parametrize(
    ("pipeline", "bound", "flags"),
    [
        ("async-partial", 2, ["--update-weight-transport", "broadcast", *LONG_ANSWERS]),
        ("async", 1, ["--max-staleness", "1", "--update-weight-transport", "disk", "--actor-num-gpus-per-node", "2"]),
        ("stream", 0, ["--update-weights-interval", "4"]),
    ],
)
def test_a_pipeline(
    rl_flags: list[str], task: Path, tmp_path: Path, pipeline: str, bound: int, flags: list[str]
) -> None:
    """A run that ends in its middle, and one that resumes it.

    The model of async-partial has delta nets: engines compute their states again after a push and a death.
    """
    folder, model = tmp_path / "run", task / "model"
    if pipeline == "async-partial":
        model = tmp_path / "model"
        make_model("qwen3_5_text", task, model)
    # A rescued run begins with groups that it has: answers span versions again some steps later.
    num_steps = NUM_STEPS + 2 if pipeline == "async-partial" else NUM_STEPS
    given = [
        *rl_flags,
        "--hf-checkpoint",
        str(model),
        "--pipeline",
        pipeline,
        *flags,
        "--run-dir",
        str(folder),
        "--verify-checkpoints",
    ]
    given += ["--custom-rm-path", "tests/e2e/hooks.py:fails_late"]
    go_on = ["--save-interval", "1", "--num-rollout", str(num_steps), "--resume"]
    if pipeline == "async-partial":
        done = raises_in_a_reward(given, folder, tmp_path)
        loses_an_engine([*given, *go_on], folder, tmp_path)
    elif pipeline == "async":
        stops_a_trainer(given, folder, tmp_path)
        run([*given, *WORKER, *go_on], tmp_path)
    else:  # in the middle of a version
        short = ["--save-interval", "1", "--num-rollout", "100", "--max-restarts", "0"]
        first = launch([*given, "--colocate", *short], tmp_path)
        saved = folder / "checkpoints" / "step_000002" / "manifest.json"
        kill_and_check(first, folder, saved.is_file, "router.log", "of the router at http")
        run([*given, *go_on], tmp_path)
    rows = [row for row in metrics_of(folder) if "train/loss" in row]
    assert sorted({row["step"] for row in rows}) == list(range(1, num_steps + 1))
    if pipeline == "async-partial":
        assert len(train_steps(folder)) == num_steps, "none is trained twice"
    ages = [row["rollout/staleness/token_max"] for row in rows]
    interval = 4 if pipeline == "stream" else 1
    # In rollouts; the bound counts versions. After a resume within one, engines have newer weights than its groups.
    assert max(ages) < (bound + 1) * interval and (bound == 0 or max(ages) >= 1)
    prompts = trained_prompts(folder)
    assert len(prompts) == len(set(prompts)) == 8 * num_steps
    # The loss corrects for them by default, and the numbers tell what became of the tokens.
    assert all("train/is_ratio" in row for row in rows)
    died = next((row for row in reversed(rows) if row["attempt"] == 1), None)  # the last step before a process died
    for row in rows:
        is_drawn_ahead = row["attempt"] == 2 and pipeline == "async"  # by a worker: more than is trained in the end
        assert row["pipeline/tokens_trained"] <= row["rollout/num_tokens"]
        assert row["pipeline/tokens_dropped"] == 0 or is_drawn_ahead or row is died
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
        versions = checkpoint_versions(folder, model)  # without those before the rescue
        lost = set(range(num_steps)) - set(versions)
        assert lost == set(range(1, done))
        samples = [sample for sample in saved_samples(folder) if lost.isdisjoint(sample.versions.tolist())]
        found = rescore(samples, versions, max_staleness=bound)
        assert found.told() == [] and found.samples == len(samples)
        # Step 1 is of version 0; from step done + bound + 1 on, no token is older than version `done`.
        assert len(samples) >= 8 * 4 * (1 + num_steps - done - bound)
        assert found.stale_tokens > 0 and found.spanning > 0
        assert sum(row["pipeline/tokens_prefilled_again"] for row in rows) > 0
