"""The default data source: epochs, order, and a cursor that goes on exactly where it was saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.buffer.data_source import RolloutDataSource
from fusionrl.config.config import Config
from fusionrl.data.sample import Sample


@pytest.fixture
def source(tiny_model: Path, write_rows: Callable[..., Path]) -> Callable[..., RolloutDataSource]:
    """source(rows=…, flag=value, …) over prompts `p0` … `p9`."""

    def make(rows: list[Any] | None = None, **changes: Any) -> RolloutDataSource:
        data = write_rows(rows or [{"input": f"p{i}"} for i in range(10)])
        values = {"hf_checkpoint": str(tiny_model), "prompt_data": str(data), "n_samples_per_prompt": 2}
        return RolloutDataSource(Config.from_flat(values | changes).to_args())

    return make


def take(source: RolloutDataSource, count: int) -> list[Any]:
    return [group[0].prompt for group in source.get_samples(count)]


def test_epochs_without_shuffle(source: Any) -> None:
    made = source()
    assert take(made, 4) == ["p0", "p1", "p2", "p3"]
    assert take(made, 8) == ["p4", "p5", "p6", "p7", "p8", "p9", "p0", "p1"]
    assert (made.epoch, made.offset) == (1, 2)


def test_groups_are_numbered_and_independent(source: Any) -> None:
    groups = source().get_samples(3)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]
    assert [[s.group_index for s in group] for group in groups] == [[0, 0], [1, 1], [2, 2]]
    groups[0][0].metadata["x"] = 1
    assert groups[0][1].metadata == {}


def test_shuffle_by_seed_and_epoch(source: Any) -> None:
    first = source(rollout_shuffle=True)
    epochs = [take(first, 10), take(first, 10)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [f"p{i}" for i in range(10)]
    assert epochs[0] != epochs[1], "each epoch has an order of its own"
    assert take(source(rollout_shuffle=True), 10) == epochs[0]
    assert take(source(rollout_shuffle=True, rollout_seed=7), 10) != epochs[0]


def test_a_restored_cursor_goes_on_exactly(source: Any) -> None:
    made = source(rollout_shuffle=True)
    take(made, 13)
    handed_back = made.get_samples(2)
    handed_back[0][0].metadata["turn"] = 1
    made.add_samples(handed_back)
    state = json.loads(json.dumps(made.state_dict()))
    wanted = [[s.to_dict() for s in group] for group in made.get_samples(9)]
    resumed = source(rollout_shuffle=True)
    resumed.load_state_dict(state)
    found = [[s.to_dict() for s in group] for group in resumed.get_samples(9)]
    assert found == wanted
    assert wanted[0][0]["metadata"] == {"turn": 1}, "what was handed back comes first"
    assert resumed.state_dict() == made.state_dict()
    assert isinstance(resumed.get_samples(1)[0][0], Sample)


def test_a_saved_state_is_a_snapshot(source: Any) -> None:
    made = source()
    made.add_samples(made.get_samples(1))
    state = made.state_dict()
    made.get_samples(1)[0][0].metadata["changed"] = True
    assert state["returned"][0][0]["metadata"] == {}
    assert state["offset"] == 1


def test_another_file_is_refused(source: Any) -> None:
    state = source().state_dict()
    with pytest.raises(ValueError, match=r"has 3 prompts now, but had 10 .* a resume needs the same file"):
        source([{"input": "x"}] * 3).load_state_dict(state)
    with pytest.raises(ValueError, match="its prompts are not those of when the checkpoint was saved"):
        source([{"input": f"p{i}"} for i in (0, 1, 2, 3, 4, 5, 6, 7, 9, 8)]).load_state_dict(state)
    source().load_state_dict(state)
