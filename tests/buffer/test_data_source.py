"""The default data source: epochs, order, and a cursor that goes on exactly where it was saved."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusionrl.buffer.data_source import PromptSource, RolloutDataSource, RolloutDataSourceWithBuffer
from fusionrl.config.config import Config
from fusionrl.config.hooks import load_function
from fusionrl.data.sample import Sample

HOOKS = Path(__file__).with_name("buffer_hooks.py")


@pytest.fixture
def source(tiny_model: Path, write_rows: Callable[..., Path]) -> Callable[..., RolloutDataSource]:
    """source(rows=…, flag=value, …) over prompts `p0` … `p9`."""

    def make(rows: list[Any] | None = None, **changes: Any) -> RolloutDataSource:
        data = write_rows(rows or [{"input": f"p{i}"} for i in range(10)])
        values = {"hf_checkpoint": str(tiny_model), "prompt_data": str(data), "n_samples_per_prompt": 2}
        return RolloutDataSource(Config.from_flat(values | changes).to_args(save=str(data.parent), load=None))

    return make


def take(source: RolloutDataSource, count: int) -> list[Any]:
    return [group[0].prompt for group in source.get_samples(count)]


def test_groups_are_numbered_and_independent(source: Any) -> None:
    groups = source().get_samples(3)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]
    assert [[s.group_index for s in group] for group in groups] == [[0, 0], [1, 1], [2, 2]]
    groups[0][0].metadata["x"] = 1
    assert groups[0][1].metadata == {}


def test_shuffle_by_seed(source: Any) -> None:
    made = source()
    assert take(made, 12) == [*(f"p{i}" for i in range(10)), "p0", "p1"] and (made.epoch, made.offset) == (1, 2)
    orders = [take(source(rollout_shuffle=True, rollout_seed=seed), 10) for seed in (42, 42, 7)]
    assert orders[0] == orders[1] != orders[2]


def test_a_saved_state_is_a_snapshot(source: Any) -> None:
    made = source()
    made.add_samples(made.get_samples(1))
    state = made.state_dict()
    made.get_samples(1)[0][0].metadata["changed"] = True
    assert state["buffer"][0][0]["metadata"] == {}
    assert state["sets"][0]["num_drawn"] == 1


def test_another_file_is_refused(source: Any) -> None:
    state = source().state_dict()
    for numbers in (range(3), (0, 1, 2, 3, 4, 5, 6, 7, 9, 8)):
        words = f"its {len(numbers)} prompts are not the 10 of the checkpoint; a resume needs"
        with pytest.raises(ValueError, match=words):
            source([{"input": f"p{i}"} for i in numbers]).load_state_dict(state)
    source().load_state_dict(state)


# ------------------------------------------------------------------------------------------------ several sets
def test_one_set_is_plain_text_for_hooks(source: Any) -> None:
    made = source()
    assert isinstance(made.args.prompt_data, str)
    assert Config.from_flat({"prompt_data": "x"}).data.model_dump()["prompt_data"] == "x"
    assert Config.from_flat({"prompt_data": ["x", "y"]}).to_args().prompt_data == ["x", "y"]
    assert "data_source" not in made.get_samples(1)[0][0].metadata


def test_samples_say_which_set_they_are_of(source: Any, write_rows: Callable[..., Path]) -> None:
    rows = [{"input": "x"}, {"input": "y", "metadata": {"data_source": "own"}}]
    other = write_rows(rows, "other.jsonl")
    first = write_rows([{"input": f"a{i}"} for i in range(5)], "first.jsonl")
    made = source(prompt_data=[f"{first}@[1:-1]", f"second={other}"], prompt_data_weights=[0.5, 0.5])
    assert len(made) == len(made.prompts) == 5
    found = [(g[0].prompt, g[0].metadata["data_source"]) for g in made.get_samples(4)]
    assert found == [("a1", "first"), ("x", "second"), ("a2", "first"), ("y", "own")]
    named = source(prompt_data=[f"only={first}"])
    assert named.get_samples(1)[0][0].metadata == {"data_source": "only"}


def test_too_long_prompts_are_counted_over_all_sets(source: Any, write_rows: Callable[..., Path]) -> None:
    paths = [write_rows([{"input": "x" * n} for n in (1, 5, 9)], f"{name}.jsonl") for name in "ab"]
    made = source(prompt_data=[str(path) for path in paths], rollout_max_prompt_len=5)
    assert (len(made), made.num_too_long) == (4, 2)


# ------------------------------------------------------------------------------------------------ the buffer
def partial(source: Any, count: int) -> list[list[Sample]]:
    groups = source.get_samples(count)
    for number, group in enumerate(groups):
        sample = group[0]
        sample.tokens = sample.prompt_tokens
        sample.append_response_tokens(tokens=[7] * (number + 1), log_probs=[-0.1] * (number + 1), finish_reason="abort")
        sample.routed = np.full((2, number + 1), 3, np.uint8)
    return groups


def test_a_restored_source_goes_on_exactly(source: Any) -> None:
    made = source(rollout_shuffle=True)
    take(made, 13)
    made.add_samples(partial(made, 3))
    made.update_metadata({"curriculum": 4})
    resumed = source(rollout_shuffle=True)
    resumed.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert (resumed.get_buffer_length(), resumed.get_metadata()) == (3, {"curriculum": 4})
    for a, b in zip(*(chain(*one.get_samples(9)) for one in (made, resumed)), strict=True):
        assert a.to_dict() == b.to_dict() and a.status is b.status
        for name in ("tokens", "rollout_log_probs", "loss_mask", "weight_versions", "routed"):
            before, after = getattr(a, name, None), getattr(b, name, None)
            assert type(before) is type(after)
            if isinstance(before, np.ndarray):
                assert (before.dtype, before.tobytes()) == (after.dtype, after.tobytes()), name
    assert resumed.state_dict() == made.state_dict()


def test_save_and_load_as_with_slime(source: Any) -> None:
    made = source()
    made.add_samples(partial(made, 2))
    made.save(7)
    resumed = source()
    resumed.load(6)
    assert resumed.num_samples == 0, "there is no such state: the run starts anew"
    resumed.load(7)
    assert resumed.state_dict() == made.state_dict()


def test_what_is_handed_back_is_checked(source: Any) -> None:
    made = source()
    for wrong in (made.get_samples(1)[0], [[]], None, [["text"]]):
        with pytest.raises(ValueError, match=r"data_source\.add_samples got .* not a list of groups"):
            made.add_samples(wrong)
    assert made.buffer == []


# ------------------------------------------------------------------------------------------------ --buffer-filter-path
def with_filter(source: Any, name: str) -> RolloutDataSourceWithBuffer:
    made = source(buffer_filter_path=f"{HOOKS}:{name}")
    made.add_samples(partial(made, 4))
    return made


def test_a_filter_chooses_what_comes_first(source: Any, notes: Any) -> None:
    made = with_filter(source, "newest_first")
    made.buffer[2][0].metadata["stale"] = True
    assert take(made, 2) == ["p3", "p1"]
    assert take(made, 2) == ["p0", "p4"], "then new prompts"
    take(made, 1)
    assert notes["CALLS"] == [(None, 4, 2), (None, 1, 2)], "an empty buffer asks for nothing"


def test_what_a_filter_left_in_the_buffer_is_not_served_twice(source: Any) -> None:
    made = with_filter(source, "most_finished")
    assert take(made, 3) == ["p3", "p2", "p1"]
    assert take(made, 2) == ["p0", "p4"]


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (lambda _, buffer, __: list(buffer), "it returned 4 groups, but at most 2 were requested"),
        (lambda _, buffer, __: buffer[0], "it returned list, not a list of groups"),
        (lambda _, buffer, __: [buffer[0]] * 2, "it returned a group twice"),
        (lambda _, buffer, __: None, "it returned NoneType, not a list of groups"),
    ],
)
def test_a_filter_that_returns_something_else(source: Any, notes: Any, answer: Any, part: str) -> None:
    notes["ANSWER"][0] = answer
    with pytest.raises(ValueError, match=f"--buffer-filter-path .*:answers: {part}"):
        with_filter(source, "answers").get_samples(2)


def test_messages_without_a_template_stay_a_list_for_functions(source: Any) -> None:
    messages = [{"role": "user", "content": "1 + 1"}]
    rows = [{"input": messages}, {"input": "text"}]
    made = source(rows, custom_generate_function_path=f"{HOOKS}:any", rollout_max_prompt_len=4)
    first = made.get_samples(2)[0][0]
    assert first.prompt == messages and first.prompt_tokens is None
    restored = source(rows, custom_generate_function_path=f"{HOOKS}:any")
    restored.load_state_dict(made.state_dict())
    with pytest.raises(ValueError, match="add --apply-chat-template"):
        source(rows)


# ----------------------------------------------------------------- the examples of docs/guides/data.md
ROOT = Path(__file__).parents[2]


def block(first_line: str) -> str:
    """The indented block of the page that begins so."""
    lines = (ROOT / "docs" / "guides" / "data.md").read_text(encoding="utf-8").split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith("    " + first_line))
    end = next(number for number in range(start, len(lines)) if lines[number] and lines[number][0] != " ")
    return "\n".join(line[4:] for line in lines[start:end]).strip() + "\n"


def test_the_check(tmp_path: Path) -> None:
    commands, output = block("printf").split("\n\n")
    script = f'fusionrl() {{ "{sys.executable}" -m fusionrl.cli "$@"; }}\n{commands}'
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, output, "")


@pytest.mark.parametrize(
    ("flag", "first_line", "name", "wanted"),
    [
        ("buffer_filter_path", "# newest.py", "newest_first", ["c", "b", "a", "d"]),
        ("data_source_path", "# curriculum.py", "Curriculum", ["a", "b", "c", "d"]),
    ],
)
def test_the_hooks(tiny_model, write_rows, tmp_path, flag, first_line, name, wanted) -> None:
    program = tmp_path / first_line.removeprefix("# ")
    program.write_text(block(first_line).split("\nfusionrl ")[0])
    data = write_rows([{"input": text} for text in "abcd"])
    flags = {"hf_checkpoint": str(tiny_model), "prompt_data": str(data), flag: f"{program}:{name}"}
    args = Config.from_flat(flags).to_args()

    source = load_function(args.data_source_path)(args)
    source.add_samples(source.get_samples(3))
    resumed = load_function(args.data_source_path)(args)
    resumed.load_state_dict(source.state_dict())
    groups = resumed.get_samples(4)
    assert [group[0].prompt for group in groups] == wanted
    if name == "Curriculum":
        assert {group[0].metadata["level"] for group in groups} == {1}


def test_a_state_stays_as_it_was_and_needs_both_functions() -> None:
    """A user's source may change later what it gave; without `load_state_dict` a new Buffer would begin anew."""
    source, live = PromptSource(Config.from_flat({})), {"queue": [1, 2]}
    source.hooked = SimpleNamespace(state_dict=lambda: live)
    assert not source.can_be_restored
    source.hooked.load_state_dict = live.update
    assert source.can_be_restored
    before = source.state()
    live["queue"].append(3)
    assert before == {"queue": [1, 2]}
