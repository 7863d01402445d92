"""What a person sees while a run goes on, and after it, where there is nothing to learn, and then a mistake."""

import json
import re
import shlex
import tarfile
from pathlib import Path

import pytest

from fusionrl.observe.rollouts import list_rollouts, read_rollouts
from tests.e2e.launch import metrics_of, printed_by, run

pytestmark = pytest.mark.e2e


def test_a_reward_that_is_always_0_and_then_raises(rl_flags: list[str], tmp_path: Path) -> None:
    """Both are said with a cause: three steps that teach nothing, and a fourth rollout that fails.

    The three steps are saved. The command in the error continues the run, with the flag that it offers to its end.
    """
    folder = tmp_path / "a run"
    flags = [*rl_flags, "--custom-rm-path", "tests/e2e/hooks.py:never", "--num-rollout", "4", "--log-samples", "2"]
    launched = run([*flags, "--rollout-max-response-len", "2", "--run-dir", str(folder)], tmp_path, code=1)
    check_warnings(launched.output(), folder)
    check_failure(launched.output(), folder)
    check_report(folder)
    command = re.search(r"^to continue: fusionrl train (.*)$", launched.output(), re.MULTILINE)
    offer = re.search(
        r"^with (--reward-failure-value 0) the run continues: such samples", launched.output(), re.MULTILINE
    )
    assert command is not None and offer is not None
    again = run([*shlex.split(command[1]), *offer[1].split()], tmp_path)
    assert "32 of 32 samples made the reward function raise" in " ".join(again.output().split())
    last = metrics_of(folder)[-1]
    assert (last["attempt"], last["step"], last["rollout/reward_error"]) == (2, 4, 32)


def check_warnings(output: str, folder: Path) -> None:
    """On the console and in the log, once in three steps; the command that the warning names shows the samples."""
    assert len(metrics_of(folder)) == 4
    assert all(row["train/grad_norm"] == 0 for row in metrics_of(folder)[1:])
    for text in (output, (folder / "logs" / "driver.log").read_text()):
        warnings = re.findall(r"step (\d): this rollout teaches nothing: all 8 groups have equal rewards", text)
        assert warnings == ["1"], text[-3000:]
        assert "likely: the reward is always 0" in text
        assert re.search(r"likely: \d+% of the answers were cut off at --rollout-max-response-len 2", text)
        assert re.search(
            r'sample \d+: prompt ".*\d+\+\d+.*"; answer ".*" \(\d tokens, .*\); label "\d+"; reward 0', text
        )
    assert len(re.findall(r"^step \d: 2 samples", output, re.MULTILINE)) == 3
    command = re.search(r"look: fusionrl show (.*)", output)
    assert command is not None
    shown = printed_by("show", *shlex.split(command[1]))
    assert "step 1" in shown and "groups with equal rewards: 8" in shown and "5 of 8:" in shown
    shown = printed_by("show", folder, "--step", "1", "-n", "0", "--json")
    records = [json.loads(line) for line in shown.splitlines()]
    assert len(records) == 32 and all(record["advantage"] == 0 for record in records)
    total = sum(record["mismatch"] * record["num_trained"] for record in records)
    tokens = sum(record["num_trained"] for record in records)
    assert metrics_of(folder)[1]["train/logprob_diff_mean"] == pytest.approx(total / tokens, rel=1e-6)


def check_failure(output: str, folder: Path) -> None:
    """The console names flag, function, error and sample, and shows the user's lines; the log has all of them."""
    last = "\n".join(output.rstrip().splitlines()[-14:])
    assert "the run ended after step 3; step_000003 has all of it: --resume continues from there\n" in last
    assert "--custom-rm-path tests/e2e/hooks.py:never: KeyError: 'answer' at sample " in last
    assert "raise KeyError" in last and 'tests/e2e/hooks.py", line ' in last
    assert "fusionrl/rewards/reward_call.py" not in output
    (file,) = list_rollouts(folder, kind="failed")
    (row,) = file.rows()
    assert str(file.path) in last and f"at sample {row['index']}" in last and row["prompt"]
    assert row["response_length"] > 0  # its text may be empty: an end token alone
    log = (folder / "logs" / "driver.log").read_text()
    assert all(
        name in log for name in ("fusionrl/rewards/reward_call.py", "fusionrl/buffer/actor.py", "tests/e2e/hooks.py")
    )


def check_report(folder: Path) -> None:
    """`fusionrl report` has the warning and the traceback of this run, and no sample of it."""
    printed_by("report", folder)
    with tarfile.open(folder / "report.tar.gz") as archive:
        texts = {member.name: file.read().decode() for member in archive if (file := archive.extractfile(member))}
    log = texts["report/logs/driver.log"]
    assert "this rollout teaches nothing" in log and "fusionrl/rewards/reward_call.py" in log
    assert "--custom-rm-path tests/e2e/hooks.py:never: KeyError: …" in log
    assert json.loads(texts["report/failure.a1.json"])["process"] == "the Buffer"
    prompts = {str(row["prompt"]) for row in read_rollouts(folder)}
    assert len(prompts) > 8 and not [text for text in prompts if any(text in member for member in texts.values())]
