"""What trainers find out about samples by position lands on the right lines of the rollout's file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fusionrl.observe.rollouts import list_rollouts
from tests.buffer.test_actor import HOOKS, MakeBuffer, buffer, data, notes  # noqa: F401 (fixtures)


def answer(shards: list[Any]) -> list[dict[int, dict[str, Any]]]:
    """As ranks would: of each position the index of the sample that stands there."""
    names = ("position", "sample_index", "rewards")
    rows = [zip(*(shard.fields[name].tolist() for name in names), strict=True) for shard in shards]
    return [{p: {"seen_index": index, "trained_reward": reward} for p, index, reward in part} for part in rows]


def trained_rows(made: Any, rollout_id: int = 0) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    file = next(file for file in list_rollouts(made.run_dir) if file.rollout_id == rollout_id)
    return [(row, file.trained().get(line)) for line, row in enumerate(file.rows())]


def test_every_sample_of_a_plain_rollout(buffer: MakeBuffer) -> None:  # noqa: F811
    made = buffer()
    for rollout_id in range(2):
        rollout = asyncio.run(made.generate(rollout_id))
        asyncio.run(made.add_trained(rollout_id, answer(rollout.shards)))
        pairs = trained_rows(made, rollout_id)
        assert len(pairs) == 8
        for row, found in pairs:
            assert found is not None and found["seen_index"] == row["index"]
            assert (found["trained_reward"] > 0) == (row["reward"] > 0.5)


def test_pairs_are_some_of_the_samples_in_another_order(buffer: MakeBuffer) -> None:  # noqa: F811
    made = buffer(policy_loss="dpo", custom_rm_path=f"{HOOKS}:graded", n_samples_per_prompt=4, num_steps_per_rollout=2)
    rollout = asyncio.run(made.generate(0))
    asyncio.run(made.add_trained(0, answer(rollout.shards)))
    found = [(row, trained) for row, trained in trained_rows(made) if trained is not None]
    assert len(found) == 8, "two of the four samples of each prompt"
    assert all(trained["seen_index"] == row["index"] for row, trained in found)


def test_blanks_of_pairs_are_no_samples(buffer: MakeBuffer) -> None:  # noqa: F811
    made = buffer(policy_loss="dpo", custom_rm_path=f"{HOOKS}:same", num_steps_per_rollout=2)
    rollout = asyncio.run(made.generate(0))
    assert rollout.facts is not None and rollout.facts.teaches_nothing
    asyncio.run(made.add_trained(0, answer(rollout.shards)))
    assert all(trained is None for _, trained in trained_rows(made))


@pytest.mark.parametrize("has_indices", [True, False])
def test_a_users_conversion(has_indices: bool, buffer: MakeBuffer) -> None:  # noqa: F811
    """Backwards and without the first two; without indices nobody knows which sample is which."""
    name = "backwards" if has_indices else "backwards_without_indices"
    made = buffer(custom_convert_samples_to_train_data_path=f"{Path(__file__).with_name('buffer_hooks.py')}:{name}")
    rollout = asyncio.run(made.generate(0))
    asyncio.run(made.add_trained(0, answer(rollout.shards)))
    pairs = trained_rows(made)
    if has_indices:
        assert [trained and trained["seen_index"] for _, trained in pairs] == [None, None, 2, 3, 4, 5, 6, 7]
    else:
        assert all(trained is None for _, trained in pairs)


def test_what_comes_late_or_twice_is_left_out(buffer: MakeBuffer) -> None:  # noqa: F811
    made = buffer()
    columns = answer(asyncio.run(made.generate(0)).shards)
    asyncio.run(made.add_trained(7, columns))
    asyncio.run(made.add_trained(0, [{}]))
    assert not (made.run_dir / "rollouts" / "trained").exists(), "in the first steps of a critic nothing is trained"
    asyncio.run(made.add_trained(0, columns))
    assert not (made.run_dir / "rollouts" / "trained").exists()


def test_facts_and_samples_for_the_console(buffer: MakeBuffer) -> None:  # noqa: F811
    rollout = asyncio.run(buffer(log_samples=3).generate(0))
    assert rollout.facts is not None and not rollout.facts.teaches_nothing and rollout.facts.num_equal_groups == 0
    wanted = [(0, "answer 0", "0"), (2, "answer 2", "1"), (5, "answer 5", "2")]
    assert [(one.index, one.response, one.label) for one in rollout.glimpses] == wanted
