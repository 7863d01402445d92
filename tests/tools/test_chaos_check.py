"""tools/chaos_check.py on made-up runs: a prompt that is lost, doubled or too old is seen, a good run is not blamed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools import chaos_check as check

SHAPE = check.Shape(
    tuple(f"{number}+1=" for number in range(20)), 4, 3, 2, max_staleness=1, refused=frozenset({"3+1=", "8+1="})
)
Steps = dict[int, list[dict[str, Any]]]


def good_run(shape: check.Shape = SHAPE) -> Steps:
    """Prompts in order, each answered by the weights of the step, and in part by those before."""
    steps: Steps = {}
    for place, prompt in enumerate(shape.wanted[: shape.num_steps * shape.groups_per_step]):
        step, group = place // shape.groups_per_step + 1, shape.prompts.index(prompt)
        now = shape.version_before(step) * shape.steps_per_push
        oldest = max(0, now - shape.max_staleness * shape.steps_per_push)
        row = {"prompt": prompt, "group_index": group, "response_length": 3}
        for index in range(group * shape.samples_per_group, (group + 1) * shape.samples_per_group):
            steps.setdefault(step, []).append(row | {"index": index, "weight_versions": [oldest, now, now]})
    return steps


def violations(steps: Steps, shape: check.Shape = SHAPE, num_dropped: int = 0) -> list[str]:
    return check.check_prompts(shape, steps, num_dropped=num_dropped) + check.check_bound(shape, steps)


def change(steps: Steps, step: int, group: int, **values: object) -> None:
    """Change the samples of a step's group."""
    for row in steps[step][2 * group : 2 * group + 2]:
        row.update(values)


def double_the_group(steps: Steps) -> None:
    """A ready group that was trained, and came back by the resume in place of the next one."""
    steps[3][:2] = [dict(row, weight_versions=[2, 2, 2]) for row in steps[2][:2]]


def lose(steps: Steps) -> None:
    """A group that was in flight at the kill, and the data continue after it."""
    for row in steps[4][4:]:
        row.update(prompt="14+1=", group_index=14, index=row["index"] + 2)


CASES: dict[str, Callable[[Steps], object]] = {
    # A prompt that was drawn again: another group, the same text.
    "prompts trained twice: 0+1=": lambda steps: change(steps, 4, 2, prompt=steps[1][0]["prompt"]),
    "samples trained twice: 8, 9": double_the_group,
    "1 prompts lost: 13+1=": lose,
    "the filter drops: 3+1=": lambda steps: change(steps, 1, 0, prompt="3+1="),
    "not in the data: of nowhere": lambda steps: change(steps, 1, 0, prompt="of nowhere"),
    "steps without samples: 2": lambda steps: steps.pop(2),
    "step 2 has groups of [2, 1, 2] samples": lambda steps: steps[2].pop(3),
    "samples of different prompts in group 5": lambda steps: steps[2][3].update(prompt="19+1="),
    "step 4, sample 25: a token is 2 pushes old, the bound is 1": lambda steps: steps[4][3].update(
        weight_versions=[2, 1, 3]
    ),
    # An answer of the weights after a step that was lost with the kill.
    "a token of version 2, from later": lambda steps: steps[2][0].update(weight_versions=[1, 1, 2]),
    "a token of unknown weights": lambda steps: steps[2][0].update(weight_versions=[1, 1, -1]),
    "not one weight version a token": lambda steps: steps[2][0].update(weight_versions=[1, 1]),
}


def test_a_good_run_has_no_violation() -> None:
    assert violations(good_run()) == check.check_metrics(SHAPE, killed_and_resumed()) == []
    assert check.largest_age(SHAPE, good_run()) == 1


@pytest.mark.parametrize(("message", "spoil"), CASES.items())
def test_a_spoilt_run_is_seen(message: str, spoil: Callable[[Steps], object]) -> None:
    steps = good_run()
    spoil(steps)
    assert any(message in violation for violation in violations(steps)), violations(steps)


def test_the_bound_counts_pushes() -> None:
    """With a push after two rollouts, steps 3 and 4 are trained by version 2."""
    shape = check.Shape(SHAPE.prompts, 4, 3, 2, max_staleness=0, steps_per_push=2)
    steps = good_run(shape)
    assert violations(steps, shape) == []
    assert {version for row in steps[4] for version in row["weight_versions"]} == {2}
    steps[3][0]["weight_versions"] = [2, 1, 2]
    assert "step 3, sample 12: a token is 1 pushes old, the bound is 0" in violations(steps, shape)


def test_groups_that_are_late_may_be_missing_as_often_as_they_were_dropped() -> None:
    shape = check.Shape(SHAPE.prompts, 4, 3, 2, max_staleness=1, drops_late=True)
    steps = good_run(shape)
    for row in steps[2][:2]:
        row.update(prompt="12+1=", group_index=12, index=row["index"] + 100)
    assert violations(steps, shape, num_dropped=1) == []
    assert violations(steps, shape, num_dropped=0) == ["1 prompts lost, but 0 groups were dropped: 3+1="]


def lines(attempt: int, steps: range, **values: object) -> list[dict[str, object]]:
    return [{"step": step, "attempt": attempt, "sync/version": step} | values for step in steps]


def killed_and_resumed() -> list[check.Launch]:
    """Killed after step 3, with a checkpoint of step 2."""
    first = check.Launch(0, lines(1, range(4)), is_last=False)
    return [first, check.Launch(2, lines(2, range(2, 5)), is_last=True)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"first_step": 3}, "goes on from step 3, but its lines are of [2, 3, 4]"),
        ({"rows": lines(2, range(2, 4)) + lines(2, range(3, 5))}, "its lines are of [2, 3, 3, 4]"),
        ({"rows": lines(2, range(2, 5, 2))}, "its lines are of [2, 4]"),
        ({"rows": lines(2, range(2, 4))}, "ended well after step 3 of 4"),
        ({"rows": []}, "ended well without a line"),
        ({"rows": lines(1, range(2, 5))}, "writes as attempt 1"),
        ({"rows": lines(2, range(2, 5), **{"sync/version": 2})}, "versions do not go up"),
        ({"rows": lines(2, range(2, 5), **{"rollout/staleness/token_max": 2.0})}, "token_max is 2"),
        ({"rows": lines(2, range(2, 5), **{"train/logprob_diff_max": 0.1})}, "other weights sampled"),
        ({"rows": lines(2, range(2, 5), nonfinite=["train/loss"])}, "not finite"),
    ],
)
def test_metrics_of_spoilt_runs(changes: dict[str, Any], said: str) -> None:
    first, second = killed_and_resumed()
    assert said in "; ".join(check.check_metrics(SHAPE, [first, replace(second, **changes)]))


def test_the_folder_of_a_run_is_read(tmp_path: Path) -> None:
    """Of a step that ran twice the later attempt counts; a torn line is counted, an unpublished checkpoint is not."""
    (tmp_path / "rollouts" / "trained").mkdir(parents=True)
    for name, prompt in (("step_000001.train.a1", "a"), ("step_000001.train.a2", "b"), ("step_000002.train.a1", "c")):
        (tmp_path / "rollouts" / f"{name}.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    assert check.trained_rows(tmp_path) == {1: [{"prompt": "b"}], 2: [{"prompt": "c"}]}
    assert set(check.trained_rows(tmp_path, 1)) == {1}
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "attempt": 1}\n{"step": 1, "att\n{"step": 0, "attempt": 2}\n')
    assert check.metric_lines(tmp_path) == ([{"step": 0, "attempt": 1}, {"step": 0, "attempt": 2}], 1)
    assert check.newest_checkpoint(tmp_path) == 0
    for name in ("step_000002", "step_000004", ".writing_step_000006"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000002" / "manifest.json").touch()
    assert check.newest_checkpoint(tmp_path) == 2
    (tmp_path / "rollouts" / ".step_000003.train.a1.jsonl.7.tmp").touch()
    left = ["checkpoints/.writing_step_000006", "rollouts/.step_000003.train.a1.jsonl.7.tmp"]
    assert check.leftovers(tmp_path) == left
