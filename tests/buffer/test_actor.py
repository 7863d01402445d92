"""The Buffer: its control loop stays awake, hooks are applied once, a resume loses and doubles nothing."""

import asyncio
import functools
import json
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl import cli
from fusionrl.buffer import sample_files
from fusionrl.buffer.actor import BufferActor, EngineEndpoints
from fusionrl.buffer.evaluation import MixedVersions
from fusionrl.config.hooks import HookError
from fusionrl.data.sample import Sample
from fusionrl.observe.rollouts import list_rollouts
from fusionrl.rollout.types import RolloutAborted

HOOKS = Path(__file__).with_name("buffer_hooks.py")
MakeBuffer = Callable[..., BufferActor]


def scored(buffer: BufferActor) -> list[int]:
    """Samples that were scored, once for each time."""
    return sorted(map(int, (buffer.run_dir / "scored.txt").read_text().split()))


run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run


def resume(made: BufferActor, rollout_id: int, other: BufferActor) -> BufferActor:
    """Load what a Buffer saves of a rollout into another one, and return that."""
    path = str(made.run_dir / "saved.json")
    run(made.save(path, rollout_id))
    run(other.load(path))
    return other


def sample_indices(shards: list[Any]) -> list[int]:
    return sorted(int(i) for shard in shards for i in shard.fields["sample_index"])


# ------------------------------------------------------------------------------------------------ rollouts
def test_a_rollout_becomes_one_shard_a_rank(buffer: MakeBuffer, notes: Any) -> None:
    made = buffer()
    rollout = run(made.generate(0))
    assert len(rollout.shards) == 2 and sample_indices(rollout.shards) == list(range(8))
    for shard in rollout.shards:
        # Rewards 0 and 1 in each group: advantages of equal size and opposite sign.
        assert set(shard.fields["raw_rewards"].tolist()) <= {0.0, 1.0}
        assert np.allclose(shard.fields["rewards"], (2 * shard.fields["raw_rewards"] - 1) / np.sqrt(2), atol=1e-4)
        assert shard.fields["rollout_log_probs"].tolist() == [-1.0, -2.0] * 4
    assert scored(made) == list(range(8)), "each sample is scored once"
    assert rollout.metrics["rollout/raw_reward"] == 0.5 and rollout.metrics["perf/time_generate_s"] > 0
    (file,) = list_rollouts(made.run_dir)
    assert (file.rollout_id, file.kind, file.attempt) == (0, "train", 1)
    assert [row["reward"] for row in file.rows()] == [0.0, 1.0] * 4


@pytest.mark.timed
def test_the_control_loop_answers_while_a_rollout_function_sleeps(buffer: MakeBuffer, tmp_path: Path) -> None:
    made = buffer(rollout_function_path="sleeps")

    async def scene() -> BaseException | None:
        task = asyncio.create_task(made.generate(0))
        await asyncio.sleep(0.1)
        save = functools.partial(made.save, str(tmp_path / "s.json"), -1)
        for ask in (made.progress, made.state_hash, save):
            tries = []
            for _ in range(3):  # a busy machine may hold one up
                start = time.perf_counter()
                await ask()
                tries.append(time.perf_counter() - start)
            assert min(tries) < 0.1, (ask, tries)
        made._abort.set()  # as a stream's end does
        done, _ = await asyncio.wait([task], timeout=2.0)
        assert done, "the abort did not end the rollout"
        return task.exception()

    assert isinstance(run(scene()), RolloutAborted)
    # Its prompts came back, and the next rollout begins with them.
    assert [group[0].prompt for group in made.source.hooked.buffer] == ["p0", "p1", "p2", "p3"]


def test_groups_that_are_missing_are_asked_for_again(buffer: MakeBuffer, notes: Any) -> None:
    made = buffer(rollout_function_path="one_group_short")
    rollout = run(made.generate(0))
    assert sample_indices(rollout.shards) == scored(made) == list(range(8)) and notes["CALLS"] == [0] * 4
    assert rollout.metrics["rollout/dropped_mine"] == 4, "counts of several calls add up"
    assert rollout.metrics["rollout/calls"] == 4, "other metrics are those of the last call"


def test_a_filter_is_applied_to_groups_that_were_scored_here(buffer: MakeBuffer, notes: Any) -> None:
    made = buffer(custom_rm_path="by_label", dynamic_sampling_filter_path="differing")
    rollout = run(made.generate(0))
    assert len(notes["CALLS"]) == 2
    # Prompts 1, 3, 5, 7 differ; the even ones are dropped and counted.
    assert sample_indices(rollout.shards) == [2, 3, 6, 7, 10, 11, 14, 15]
    assert rollout.metrics["rollout/dropped_flat"] == 4
    assert scored(made) == list(range(16)), "none is scored twice"


def test_a_function_that_never_gives_enough_is_named(buffer: MakeBuffer, notes: Any) -> None:
    words = r"--rollout-function-path .*:nothing: 10 calls gave 0 groups .* --rollout-batch-size is 4"
    with pytest.raises(ValueError, match=words):
        run(buffer(rollout_function_path="nothing").generate(0))


def test_siblings_without_a_group_number_are_still_siblings(buffer: MakeBuffer) -> None:
    """Taken for groups of one, every advantage would be 0 and nothing would be learnt."""
    rollout = run(buffer(rollout_function_path="without_numbers").generate(0))
    for shard in rollout.shards:
        assert np.abs(shard.fields["rewards"]).min() > 0.5
    groups = np.concatenate([shard.fields["group_index"] for shard in rollout.shards])
    assert sorted(np.unique(groups, return_counts=True)[1]) == [2, 2, 2, 2]
    assert rollout.metrics["rollout/zero_std_groups"] == 0.0


def test_a_function_that_makes_its_samples_needs_no_prompt_data(buffer: MakeBuffer) -> None:
    made = buffer(prompt_data=None, rollout_function_path="without_numbers")
    assert made.source.hooked is None and len(sample_indices(run(made.generate(0)).shards)) == 8


# ------------------------------------------------------------------------------------------------ rewards
def test_a_reward_of_several_parts(buffer: MakeBuffer) -> None:
    rollout = run(buffer(custom_rm_path="several", reward_key="right").generate(0))
    assert rollout.metrics["rollout/raw_reward"] == 0.5
    with pytest.raises(ValueError, match=r"sample 0: .*\['right', 'style'\]; choose one with --reward-key"):
        run(buffer(run="other", custom_rm_path="several").generate(0))


def test_raw_rewards_and_post_processing(buffer: MakeBuffer, notes: Any) -> None:
    made = buffer(disable_rewards_normalization=True)
    shard = run(made.generate(0)).shards[0]
    assert np.array_equal(shard.fields["rewards"], shard.fields["raw_rewards"])
    made = buffer(run="b", custom_reward_post_process_path="answers")
    raw = np.arange(8.0)
    notes["ANSWER"][0] = lambda samples: (raw, raw / 2)
    shard = run(made.generate(0)).shards[0]
    assert np.array_equal(shard.fields["rewards"], shard.fields["raw_rewards"] / 2)
    for answer, part in (
        ((raw, raw[1:]), "8 raw and 7 rewards for 8 samples"),
        ((raw, [0.0, 0.0, float("nan"), *raw[3:]]), r"rewards\[2\] is nan; a reward must be"),
        (None, r"it returned NoneType; a tuple \(raw rewards, rewards\) is wanted"),
    ):
        notes["ANSWER"][0] = lambda samples, answer=answer: answer
        with pytest.raises((ValueError, HookError), match=f"--custom-reward-post-process-path .*:answers: .*{part}"):
            run(made.generate(1))


def _many(samples: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(raw rewards, rewards that are trained on, groups) of all shards, in the samples' order."""
    order = np.argsort(np.concatenate([s.fields["sample_index"] for s in samples]))
    names = ("raw_rewards", "rewards", "group_index")
    return tuple(np.concatenate([s.fields[n] for s in samples])[order] for n in names)  # type: ignore[return-value]


def _assert_standardised(shards: Any, counted: slice) -> None:
    """Rewards of the `counted` samples of each group are relative to those alone; the others are 0."""
    raw, trained, groups = _many(shards)
    for group in np.unique(groups):
        wanted = np.zeros((groups == group).sum())
        own = raw[groups == group][counted]
        wanted[counted] = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
        assert trained[groups == group] == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_samples_without_a_reward_are_not_in_their_group_s_mean(buffer: MakeBuffer) -> None:
    """Six samples a prompt, two of them lost: the other four are compared with each other."""
    flags = {"rollout_function_path": "loses_the_first", "n_samples_per_prompt": 6}
    _assert_standardised(run(buffer(**flags, custom_rm_path="graded").generate(0)).shards, slice(1, -1))
    # Equal rewards beside lost samples teach nothing, and are reported so.
    equal = run(buffer(run="equal", **flags, custom_rm_path="same").generate(0))
    assert not _many(equal.shards)[1].any()
    assert equal.metrics["rollout/zero_std_groups"] == 1.0
    assert equal.facts.num_equal_groups == 4


def test_a_lost_reward_is_no_reward_of_0(buffer: MakeBuffer) -> None:
    """The function's process dies at the first of six answers: it is neither trained on nor in its group's mean."""
    flags = {"n_samples_per_prompt": 6, "rollout_batch_size": 2, "custom_rm_path": "dies_at_the_first"}
    made = run(buffer(**flags).generate(0))
    _assert_standardised(made.shards, slice(1, None))
    masks = np.concatenate([shard.fields["loss_mask"] for shard in made.shards])
    assert int((masks == 0).sum()) == 2 * 2, "both tokens of the answer that lost its reward, in each group"
    assert made.facts.num_crashes == 2 and made.facts.lowest == 2.0
    assert made.metrics["rollout/reward_crash"] == 2.0
    with_value = run(buffer(run="value", **flags, reward_failure_value=-1.0).generate(0))
    assert _many(with_value.shards)[0].min() == -1.0
    assert all(shard.fields["loss_mask"].all() for shard in with_value.shards)


def test_staleness_is_reported_and_marked_for_the_trainers(buffer: MakeBuffer) -> None:
    made = buffer(rollout_function_path="of_several_versions")
    rollout = run(made.generate(0, 6))
    found = {n.removeprefix("rollout/staleness/"): v for n, v in rollout.metrics.items() if "staleness" in n}
    # 14 tokens have versions: 4 are 3 pushes old, 10 are 1; of 7 samples 4 are 3 old.
    assert found == {
        **{"token_mean": pytest.approx(22 / 14), "token_max": 3.0, "sample_mean": pytest.approx(15 / 7)},
        **{"sample_max": 3.0, "tokens/0": 0.0, "tokens/1": pytest.approx(10 / 14), "tokens/3": pytest.approx(4 / 14)},
        **{"samples/0": 0.0, "samples/1": pytest.approx(3 / 7), "samples/3": pytest.approx(4 / 7), "unknown": 0.125},
    }
    assert sum(shard.fields["current"].sum() for shard in rollout.shards) == 2, "but for those of unknown version"
    for shard in run(buffer(run="b", rollout_function_path="of_several_versions").generate(0)).shards:
        for index, marks in zip(shard.fields["sample_index"], shard.split("current"), strict=True):
            assert marks.tolist() == [index % 2, 1.0], "without a push the newest is current"
    assert "current" not in run(buffer(run="c").generate(0, 2)).shards[0].fields


def test_pairs_of_answers(buffer: MakeBuffer) -> None:
    """The best and the worst of each prompt in one optimizer step; what is missing for a step is nothing to learn."""
    made = buffer(policy_loss="dpo", custom_rm_path="graded", n_samples_per_prompt=4, num_steps_per_rollout=2)
    shards = run(made.generate(0)).shards
    raw, signs, groups = _many(shards)
    assert sorted(signs) == [-1.0] * 4 + [1.0] * 4
    for group in set(groups.tolist()):
        mine = groups == group
        assert raw[mine & (signs > 0)][0] > raw[mine & (signs < 0)][0]
    for step in range(2):
        names = [int(s.fields["group_index"][i]) for s in shards for b in s.steps[step].micro_batches for i in b]
        assert len(names) == 4 and all(names.count(name) == 2 for name in names)
    made = buffer(run="equal", policy_loss="dpo", custom_rm_path="same", num_steps_per_rollout=2)
    shards = run(made.generate(0)).shards
    assert sum(int(s.fields["loss_mask"].sum()) for s in shards) == 0 and sum(s.num_samples for s in shards) == 4


def test_penalties_for_length_are_trained_on_and_not_reported(buffer: MakeBuffer) -> None:
    plain = {"disable_rewards_normalization": True, "rollout_max_response_len": 4}
    for flags, factor in (({"length_penalty_coef": 0.5}, 0.5), ({"overlong_buffer_len": 4}, 1.0)):
        rollout = run(buffer(run=str(factor), **plain, **flags).generate(0))
        raw, trained, _ = _many(rollout.shards)
        assert set(raw.tolist()) <= {0.0, 1.0} and rollout.metrics["rollout/raw_reward"] == raw.mean()
        assert np.isclose((raw - trained).mean(), factor * rollout.metrics["rollout/response_len/mean"] / 4)


# ------------------------------------------------------------------------------------------------ resume
def test_save_is_a_snapshot_of_the_rollout_that_was_asked_for(buffer: MakeBuffer, tmp_path: Path) -> None:
    """While rollout 1 is trained on, a function may have run ahead: the cursor saved is still that of 1."""
    made = buffer(rollout_shuffle=True)
    rollouts = [run(made.generate(i)) for i in range(3)]
    resumed = resume(made, 1, buffer(attempt=2, rollout_shuffle=True))
    again = run(resumed.generate(2))
    assert sample_indices(again.shards) == sample_indices(rollouts[2].shards) == list(range(16, 24))
    assert run(resumed.state_hash()) == run(made.state_hash())
    # What was loaded can be saved again before the first rollout of the new attempt.
    saved = made.run_dir / "saved.json"
    before, fresh = saved.read_text(), buffer(attempt=3, rollout_shuffle=True)
    assert run(fresh.load(str(saved))) == 1
    run(fresh.save(str(saved), 1))
    assert json.loads(saved.read_text()) == json.loads(before)
    with pytest.raises(AssertionError, match="no state of rollout 7"):
        run(fresh.save(str(tmp_path / "x.json"), 7))


@pytest.mark.parametrize("path", ["slime.rollout.data_source.RolloutDataSource", "OwnSource"])
def test_a_data_source_needs_no_prompt_data(buffer: MakeBuffer, tmp_path: Path, path: str) -> None:
    """slime's --disable-rollout-global-dataset: groups of empty samples, numbered, and resumed."""
    made = buffer(prompt_data=None, data_source_path=path)
    assert len(run(made.generate(0)).shards) == 2
    resumed = resume(made, 0, buffer(attempt=2, prompt_data=None, data_source_path=path))
    source = resumed.source.hooked
    if path == "OwnSource":  # a user's own, which keeps its state itself
        assert source.position == 4
    else:
        (group,) = source.get_samples(1)
        assert [(s.group_index, s.index, s.prompt, s.label) for s in group] == [(4, 8, "", None), (4, 9, "", None)]


def test_a_source_derived_as_with_slime_saves_its_own_part_too(buffer: MakeBuffer, tmp_path: Path) -> None:
    made = buffer(data_source_path="SlimeSource")
    run(made.generate(0))
    resumed = resume(made, 0, buffer(attempt=2, data_source_path="SlimeSource"))
    wanted = [[s.to_dict() for s in group] for group in made.source.hooked.get_samples(3)]
    assert resumed.source.hooked.num_calls == 1
    assert [[s.to_dict() for s in group] for group in resumed.source.hooked.get_samples(3)] == wanted


def test_a_mixture_reports_each_set_and_goes_on_exactly(buffer, write_rows, tmp_path) -> None:
    rows = {name: [{"input": f"{name}{i}", "label": ""} for i in range(9)] for name in ("math", "code")}
    specs = [f"{name}={write_rows(rows[name], name + '.jsonl')}" for name in rows]
    flags = {"prompt_data": specs, "prompt_data_weights": [3, 1], "rollout_shuffle": True}
    made = buffer(**flags)
    numbers = run(made.generate(0)).metrics
    assert (numbers["rollout/math/num_samples"], numbers["rollout/code/num_samples"]) == (6, 2)
    assert numbers["rollout/code/raw_reward"] == numbers["rollout/math/accuracy"] == 0.5, "parity rewards one of two"
    resumed = resume(made, 0, buffer(attempt=2, **flags))
    assert run(resumed.state_hash()) == run(made.state_hash())
    wanted, found = run(made.generate(1)), run(resumed.generate(1))
    assert [s.fields["rewards"].tolist() for s in found.shards] == [s.fields["rewards"].tolist() for s in wanted.shards]
    assert resumed.source.hooked.num_drawn == made.source.hooked.num_drawn == {"math": 6, "code": 2}
    with pytest.raises(ValueError, match=r"--prompt-data-weights: .* \(3/4, 1/4\); a resume needs the same"):
        resume(made, 0, buffer(attempt=2, **flags | {"prompt_data_weights": [1, 1]}))
    with pytest.raises(ValueError, match="has 1 sets now, but had 2"):
        resume(made, 0, buffer(attempt=2, prompt_data=specs[0]))
    assert "rollout/math/raw_reward" not in run(buffer(run="one", prompt_data=specs[0]).generate(0)).metrics


def test_several_adapters_get_the_shards_of_runs_of_their_own(
    buffer: MakeBuffer, write_rows: Any, tmp_path: Path
) -> None:
    """Three prompts of one and one of the other, in two optimizer steps, of which the second adapter has one."""
    rows = {name: [{"input": f"{name}{i}", "label": str(i)} for i in range(6)] for name in ("math", "code")}
    specs = [f"{name}={write_rows(rows[name], name + '.jsonl')}" for name in rows]
    flags = {"prompt_data": specs, "prompt_data_weights": [3, 1], "lora_rank": 2, "lora_adapters": ["math", "code"]}
    flags |= {"num_steps_per_rollout": 2, "save_debug_rollout_data": str(tmp_path / "both" / "{rollout_id}.jsonl")}
    made = buffer(**flags)
    rollout = run(made.generate(0))
    assert [shard.adapter for shard in rollout.shards] == ["math", "math", "code", "code"]
    numbers = rollout.metrics
    assert (numbers["adapter/math/num_samples"], numbers["adapter/code/num_samples"]) == (6, 2)
    assert numbers["adapter/code/raw_reward"] == numbers["adapter/math/accuracy"] == 0.5
    samples, alone = rows_of(tmp_path / "both" / "0.jsonl"), []
    for name, sizes in {"math": (3, 2), "code": (1, 1)}.items():
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in samples if row["adapter"] == name)
        (tmp_path / name / "0.jsonl").write_text(lines)
        one = {"load_debug_rollout_data": str(tmp_path / name / "{rollout_id}.jsonl"), "debug_train_only": True}
        one |= dict(zip(("rollout_batch_size", "num_steps_per_rollout"), sizes, strict=True))
        alone += run(buffer(run=name, lora_rank=2, **one).generate(0)).shards
    found = [shard.fields.pop("position").tolist() for shard in rollout.shards]
    own = [shard.fields.pop("position").tolist() for shard in alone]
    assert found == [*own[:2], *([6 + place for place in places] for places in own[2:])]
    for shard, wanted in zip(rollout.shards, alone, strict=True):
        np.testing.assert_equal(shard.fields, wanted.fields)
        assert (shard.steps, shard.metadata) == (wanted.steps, wanted.metadata)
    columns = {place: {"advantage": float(place)} for places in found for place in places}
    run(made.add_trained(0, [columns]))
    (trained,) = (made.run_dir / "rollouts" / "trained").iterdir()
    written = rows_of(next((made.run_dir / "rollouts").glob("*.train.a1.jsonl")))
    assert [written[row["line"]]["adapter"] for row in rows_of(trained)] == ["math"] * 6 + ["code"] * 2
    samples[0]["adapter"] = "maths"
    (tmp_path / "both" / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    again = {"load_debug_rollout_data": str(tmp_path / "both" / "{rollout_id}.jsonl"), "save_debug_rollout_data": None}
    with pytest.raises(ValueError, match=r"'maths'; set sample.adapter to one of --lora-adapters \(math, code\)"):
        run(buffer(run="again", debug_train_only=True, **flags | again).generate(0))


# ------------------------------------------------------------------------------------------------ replay
def test_saved_rollouts_can_be_trained_on_again(buffer: MakeBuffer, tmp_path: Path) -> None:
    template = str(tmp_path / "saved" / "{rollout_id}.jsonl")
    made = buffer(save_debug_rollout_data=template)
    rollouts = [run(made.generate(i)) for i in range(2)]
    replay = buffer(run="replay", debug_train_only=True, load_debug_rollout_data=template)
    for rollout_id, rollout in enumerate(rollouts):
        again = run(replay.generate(rollout_id))
        for want, found in zip(rollout.shards, again.shards, strict=True):
            np.testing.assert_equal(found.fields, want.fields)
            assert (found.steps, found.metadata) == (want.steps, want.metadata)
    with pytest.raises(ValueError, match=r"--load-debug-rollout-data: there is no .*2\.jsonl"):
        run(replay.generate(2))


# ---------------------------------------------------------------------------------------- reject sampling
def reject_sampling(buffer: MakeBuffer, **changes: Any) -> BufferActor:
    return buffer(mode="reject-sampling", no_trainer=True, **changes)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_accepted_sample_stands_there_twice(buffer: MakeBuffer) -> None:
    made = reject_sampling(buffer)
    for rollout_id in range(3):
        run(made.generate(rollout_id))
    path, summary_path = made.run_dir / "accepted.jsonl", made.run_dir / "accepted.jsonl.summary.json"
    whole = rows_of(path)
    path.write_text(path.read_text() + '{"rollout_id": 2, "half a li')  # killed in the middle of a write
    resumed = resume(made, 1, reject_sampling(buffer, attempt=2))
    assert [(row["rollout_id"], row["step"]) for row in rows_of(path)] == [(0, 1)] * 4 + [(1, 2)] * 4
    run(resumed.generate(2))
    summary = json.loads(summary_path.read_text())
    assert rows_of(path) == whole and list(summary["steps"]) == ["1", "2", "3"]
    # A folder of an earlier version counted by rollout_id.
    by_rollout = {str(int(step) - 1): counts for step, counts in summary.pop("steps").items()}
    summary_path.write_text(json.dumps(summary | {"rollouts": by_rollout}))
    resume(made, 1, reject_sampling(buffer, attempt=3))
    assert list(json.loads(summary_path.read_text())["steps"]) == ["1", "2"]
    # A resume without any checkpoint makes all rollouts again.
    restarted = reject_sampling(buffer, attempt=3)
    for rollout_id in range(3):
        run(restarted.generate(rollout_id))
    assert rows_of(path) == whole


# ------------------------------------------------------------------------------------------------ evaluation
def test_evaluation_goes_to_the_users_rollout_function(buffer: MakeBuffer, notes: Any) -> None:
    """Without --eval-function-path it is the rollout function that evaluates, as its flag's text says."""
    made = buffer()
    found = run(made.evaluate(5))
    assert notes["CALLS"] == [5] and (found["eval/set/reward"], found["eval/set/response_len"]) == (0.5, 2.0)
    assert [(file.kind, file.rollout_id) for file in list_rollouts(made.run_dir)] == [("eval-set", 5)]
    summary = json.loads((made.run_dir / "eval" / "5.json").read_text())
    of_set = summary["sets"]["set"]
    assert (summary["step"], summary["attempt"], of_set["metrics"]["reward"]) == (5, 1, 0.5)
    assert of_set["settings"] is None, "no flag names this set"


def test_an_evaluation_of_two_versions_is_an_error_and_its_samples_are_kept(buffer: MakeBuffer) -> None:
    made = buffer(eval_function_path="two_versions")
    with pytest.raises(MixedVersions, match="after step 5 .* pushed version 1, and sample 0 of set set .* version 0"):
        run(made.evaluate(5, 1))
    assert [file.kind for file in list_rollouts(made.run_dir)] == ["eval-set"]
    assert not (made.run_dir / "eval" / "5.json").exists()


def test_an_evaluation_on_engines_of_its_own_runs_beside_a_rollout(buffer: MakeBuffer) -> None:
    made = buffer(rollout_function_path="meets")
    own = {"eval_router_url": "http://r:2", "eval_urls": ("http://e:2",)}
    made.endpoints = EngineEndpoints("http://r:1", ("http://e:1",), **own)

    async def both() -> tuple[Any, Any]:
        return await asyncio.gather(made.generate(3, 0), made.evaluate(2, 0))

    rollout, metrics = run(both())
    assert sample_indices(rollout.shards) == list(range(8)) and metrics["eval/set/reward"] == 0.5
    assert [(file.kind, file.step) for file in list_rollouts(made.run_dir)] == [("eval-set", 2), ("train", 4)]


def test_the_summary_of_an_evaluation_has_its_settings(buffer: MakeBuffer, write_rows: Any) -> None:
    data = write_rows([{"input": "x", "label": "y"}], "set.jsonl")
    made = buffer(eval_prompt_data=["set", str(data)], eval_temperature=0.25)
    run(made.evaluate(5))
    settings = json.loads((made.run_dir / "eval" / "5.json").read_text())["sets"]["set"]["settings"]
    assert (settings["path"], settings["temperature"], settings["n_samples_per_eval_prompt"]) == (str(data), 0.25, 1)


# ------------------------------------------------------------------------------------------------ hooks of a rollout
def test_samples_that_a_filter_removes_are_not_trained_on(buffer: MakeBuffer) -> None:
    rollout = run(buffer(rollout_sample_filter_path="keep_even").generate(0))
    for shard in rollout.shards:
        for index, mask in zip(shard.fields["sample_index"], shard.split("loss_mask"), strict=True):
            assert mask.sum() == (0 if index % 2 else 2)


@pytest.mark.parametrize(("function", "surplus"), [("too_many", 2.0), ("with_refused", 0.0)])
def test_all_samples_are_shown_in_order_before_the_batch_is_cut(buffer, notes, function, surplus) -> None:
    """Also those of refused groups."""
    rollout = run(buffer(rollout_function_path=function, rollout_all_samples_process_path="see_order").generate(0))
    ((_, order),) = [call for call in notes["CALLS"] if isinstance(call, tuple)]
    assert order == sorted(order) and len(order) == 6 and len(sample_indices(rollout.shards)) == 8
    assert rollout.metrics.get("rollout/dropped_surplus", 0.0) == surplus


def test_a_function_may_report_in_place_of_the_usual_metrics(buffer: MakeBuffer, notes: Any) -> None:
    rollout = run(buffer(custom_rollout_log_function_path="report").generate(0))
    assert rollout.metrics["rollout/mine"] == 3.0 and rollout.metrics["rollout/num_tokens"] == 16
    assert "rollout/raw_reward" not in rollout.metrics
    assert (0, 8, True) in notes["CALLS"]
    rollout = run(buffer(run="besides", custom_rollout_log_function_path="report_besides").generate(0))
    assert rollout.metrics["rollout/raw_reward"] == 0.5


@pytest.mark.parametrize(
    "field",
    [
        *("rollout_function_path", "rollout_sample_filter_path", "rollout_all_samples_process_path"),
        *("custom_rollout_log_function_path", "custom_reward_post_process_path"),
        *("custom_convert_samples_to_train_data_path", "dynamic_sampling_filter_path", "data_source_path"),
        *("eval_function_path", "custom_eval_rollout_log_function_path"),
    ],
)
def test_a_hook_that_raises_is_named(buffer: MakeBuffer, field: str) -> None:
    def call() -> None:
        made = buffer(**{field: "breaks"})
        run(made.evaluate(0) if "eval_" in field else made.generate(0))

    with pytest.raises(HookError) as caught:
        call()
    first, where, code, *rest = str(caught.value).splitlines()
    assert first == f"--{field.replace('_', '-')} {HOOKS}:breaks: KeyError: 'mine'"
    assert where.startswith(f'  File "{HOOKS}", line ') and where.endswith(", in breaks")
    assert code == '    raise KeyError("mine")'
    assert all("samples that it was at: " in line for line in rest), "no other frames"


def failed_samples(made: BufferActor, message: str, kind: str = "failed") -> list[Sample]:
    """The samples at which a hook raised, of the file that the last line of its message names."""
    (file,) = list_rollouts(made.run_dir, kind)
    assert message.splitlines()[-1].endswith(f": {file.path}")
    return [Sample.from_dict(row) for row in file.rows()]


@pytest.mark.parametrize(
    ("changes", "indices"),
    [
        ({"custom_reward_post_process_path": "ratios"}, [3]),  # in a loop over the samples
        ({"custom_rm_path": "ratio"}, [3]),  # in a reward process
        ({"custom_rm_path": "ratios_of_a_group", "group_rm": True}, [3]),
        ({"rollout_function_path": "ratio_in_a_rollout"}, [3]),
        ({"rollout_function_path": "misaligned"}, [2]),  # it returned one that does not fit
        ({"rollout_sample_filter_path": "breaks"}, list(range(8))),  # which one is not known: all that it was given
        ({"dynamic_sampling_filter_path": "gives_none"}, [0, 1]),
    ],
    ids=str,
)
def test_the_samples_at_which_a_hook_raised_are_written(buffer, changes, indices) -> None:
    (path, name), *_ = changes.items()
    made = buffer(**changes)
    with pytest.raises(HookError) as caught:
        run(made.generate(0))
    assert str(caught.value).startswith(f"--{path.replace('_', '-')} {HOOKS}:{name}: ")
    samples = failed_samples(made, str(caught.value))
    assert [sample.index for sample in samples] == indices
    assert all(sample.prompt == f"p{sample.index // 2}" and len(sample.tokens) == 4 for sample in samples)  # type: ignore[operator]
    assert all(sample.error in str(caught.value) for sample in samples)  # type: ignore[attr-defined]
    if name == "ratio":  # the log has the traceback of the reward process
        text = "".join(traceback.format_exception(caught.value))
        assert "fusionrl/rewards/reward_call.py" in text and "fusionrl/buffer/actor.py" in text
    if "ratio" in name:
        first, *lines = str(caught.value).splitlines()
        assert first.endswith(f"{HOOKS}:{name}: ZeroDivisionError: division by zero at sample 3")
        assert "    return 1 / (sample.index - 3)" in lines
        assert lines[0].startswith(f'  File "{HOOKS}", line '), "frames of the framework are left out"


def test_a_sample_that_cannot_be_written_does_not_hide_the_error(buffer: MakeBuffer) -> None:
    made = buffer(custom_reward_post_process_path="leaves_a_trap")
    with pytest.raises(HookError, match=r":leaves_a_trap: KeyError: 'mine'"):
        run(made.generate(0))
    assert not [file for file in list_rollouts(made.run_dir) if file.kind == "failed"]


def test_samples_of_an_evaluation_have_a_file_of_their_own(buffer: MakeBuffer) -> None:
    made = buffer(custom_eval_rollout_log_function_path="looks_at_one")
    with pytest.raises(HookError, match=r":looks_at_one: KeyError: 'no such' at sample 1\n") as caught:
        run(made.evaluate(0))
    assert [sample.index for sample in failed_samples(made, str(caught.value), "eval-failed")] == [1]


@pytest.mark.parametrize("method", ["get_samples", "__len__", "state_dict", "save", "load"])
def test_a_data_source_that_raises_is_named(buffer, notes, tmp_path, method, monkeypatch) -> None:
    """In the default rollout, which calls it in many places."""
    if method == "load":
        monkeypatch.setattr(notes["Breaking"], "save", lambda self, rollout_id: None)
    monkeypatch.setattr(notes["Breaking"], method, notes["breaks"])

    def call() -> None:
        made = buffer(rollout_function_path=None, data_source_path="Breaking")
        if method == "get_samples":
            run(made.generate(0))
        run(made.save(str(tmp_path / "state.json"), -1))
        run(made.load(str(tmp_path / "state.json")))

    with pytest.raises(HookError) as caught:
        call()
    first, *lines = str(caught.value).splitlines()
    assert first == f"--data-source-path {HOOKS}:Breaking: KeyError: 'mine'"
    assert lines[0].endswith("in breaks")


def test_the_teacher_s_word_reaches_the_trainers_and_the_files(buffer: MakeBuffer, tmp_path: Path) -> None:
    """Pure distillation: no reward, and log-probs of the teacher with every response token, now and in a replay."""
    saved = str(tmp_path / "saved" / "{rollout_id}.jsonl")
    distill = {"use_opd": True, "opd_teacher_load": "t", "custom_rm_path": None, "reward_timeout_s": 5.0}
    one = buffer(**distill, rollout_function_path="taught", save_debug_rollout_data=saved)
    rollout = run(one.generate(0))
    assert rollout.metrics["rollout/raw_reward"] == 0.0
    assert rollout.metrics["rollout/opd_reverse_kl"] == pytest.approx(((-1 + 3 / 8) + (-2 + 4 / 8)) / 2)
    replay = buffer(**distill, run="replay", debug_train_only=True, load_debug_rollout_data=saved)
    for shard in (*rollout.shards, *run(replay.generate(0)).shards):
        wanted = -shard.fields["tokens"].reshape(shard.num_samples, -1)[:, -2:].astype(np.float32) / 8
        np.testing.assert_array_equal(shard.fields["teacher_log_probs"], wanted.reshape(-1), strict=True)
        assert not shard.fields["rewards"].any()
    assert "teacher_log_probs" not in run(buffer(run="without").generate(0)).shards[0].fields


# ---------------------------------------------------------------- what trainers find out about samples
def answer(shards: list[Any]) -> list[dict[int, dict[str, Any]]]:
    """As ranks would: of each position the index of the sample that stands there."""
    names = ("position", "sample_index", "rewards")
    rows = [zip(*(shard.fields[name].tolist() for name in names), strict=True) for shard in shards]
    return [{p: {"seen_index": index, "trained_reward": reward} for p, index, reward in part} for part in rows]


def trained_rows(made: Any, rollout_id: int = 0) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Generate a rollout, answer as ranks, and return each row of its file with what stands there of it."""
    asyncio.run(made.add_trained(rollout_id, answer(asyncio.run(made.generate(rollout_id)).shards)))
    file = next(file for file in list_rollouts(made.run_dir) if file.rollout_id == rollout_id)
    return [(row, file.trained().get(line)) for line, row in enumerate(file.rows())]


def test_every_sample_of_a_plain_rollout(buffer: MakeBuffer) -> None:
    made = buffer()
    for rollout_id in range(2):
        pairs = trained_rows(made, rollout_id)
        assert len(pairs) == 8
        for row, found in pairs:
            assert found is not None and found["seen_index"] == row["index"]
            assert (found["trained_reward"] > 0) == (row["reward"] > 0.5)


def test_pairs_are_some_of_the_samples_in_another_order(buffer: MakeBuffer) -> None:
    made = buffer(policy_loss="dpo", custom_rm_path="graded", n_samples_per_prompt=4, num_steps_per_rollout=2)
    found = [(row, trained) for row, trained in trained_rows(made) if trained is not None]
    assert len(found) == 8, "two of the four samples of each prompt"
    assert all(trained["seen_index"] == row["index"] for row, trained in found)


def test_blanks_of_pairs_are_no_samples(buffer: MakeBuffer) -> None:
    made = buffer(policy_loss="dpo", custom_rm_path="same", num_steps_per_rollout=2)
    assert all(trained is None for _, trained in trained_rows(made))


@pytest.mark.parametrize(
    ("name", "indices"), [("backwards", [None, None, 2, 3, 4, 5, 6, 7]), ("backwards_without_indices", [None] * 8)]
)
def test_a_users_conversion(name: str, indices: list[int | None], buffer: MakeBuffer) -> None:
    """Backwards and without the first two; without indices nobody knows which sample is which."""
    made = buffer(custom_convert_samples_to_train_data_path=name)
    assert [trained and trained["seen_index"] for _, trained in trained_rows(made)] == indices


def test_what_comes_late_or_twice_is_left_out(buffer: MakeBuffer) -> None:
    made = buffer()
    columns = answer(asyncio.run(made.generate(0)).shards)
    asyncio.run(made.add_trained(7, columns))
    asyncio.run(made.add_trained(0, [{}]))
    assert not (made.run_dir / "rollouts" / "trained").exists(), "in the first steps of a critic nothing is trained"
    asyncio.run(made.add_trained(0, columns))
    assert not (made.run_dir / "rollouts" / "trained").exists()


def test_facts_and_samples_for_the_console(buffer: MakeBuffer) -> None:
    rollout = asyncio.run(buffer(log_samples=3).generate(0))
    assert rollout.facts is not None and not rollout.facts.teaches_nothing and rollout.facts.num_equal_groups == 0
    wanted = [(0, "answer 0", "0"), (2, "answer 2", "1"), (5, "answer 5", "2")]
    assert [(one.index, one.response, one.label) for one in rollout.glimpses] == wanted


# ---------------------------------------------------------------------- samples of supervised training
TURNS = [{"role": role, "content": text} for role, text in (("user", "1+1="), ("assistant", "2"))]
END = "<|im_end|>"


@pytest.fixture
def supervise(make_buffer: Any, write_rows: Callable[..., Path]) -> Callable[..., Path]:
    """supervise(rows, steps, attempt) -> the folder of a run of mode sft, a row a step."""

    def make(rows: list[dict[str, Any]], num_steps: int = 1, attempt: int = 1) -> Path:
        flags = {"mode": "sft", "prompt_data": str(write_rows(rows)), "input_key": "q", "label_key": "a"}
        buffer = make_buffer(attempt, **flags, rollout_batch_size=1, num_rollout=9)
        for rollout_id in range(num_steps):
            asyncio.run(buffer.generate(rollout_id))
        return Path(buffer.run_dir)

    return make


def printed(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert cli.main([*map(str, argv)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "num_trained", "trained_text"),
    [
        ({"q": "1+1=", "a": "2"}, "2 tokens", f"2{END}"),
        ({"q": TURNS, "a": ""}, "2 tokens", f"2{END}"),
        (
            {"q": [*TURNS, TURNS[0], TURNS[1] | {"content": "3"}], "a": ""},
            "28 tokens, 4 trained on",
            f"2{END}[-\n<|im_start|>user\n1+1={END}\n<|im_start|>assistant\n-]3{END}",
        ),
        ({"q": [TURNS[0], TURNS[1] | {"weight": 0}, TURNS[0], TURNS[1] | {"content": "3"}], "a": ""}, "2 tokens", "3"),
    ],
)
def test_the_trained_tokens_are_shown(supervise, row, num_trained, trained_text, tiny_model, capsys) -> None:
    run = supervise([row])
    text = printed(capsys, "show", run)
    assert f"  {num_trained}  completed" in text and "mean reward" not in text
    answer = trained_text.replace("[-", "").replace("-]", "").replace("\n", "\n           ")
    assert f"  answer   {answer}" in text
    assert trained_text in printed(capsys, "view", run, "--step", 1, "--sample", 0, "--tokenizer", tiny_model)
    printed(capsys, "view", run, "--tokenizer", tiny_model)
    assert (run / "view.html").stat().st_size > 0


def test_rows_of_tokens_are_shown_too(supervise: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tokenizer.encode("a:12", add_special_tokens=False)
    run = supervise([{"tokens": tokens, "loss_mask": [0, 0, 1, 0]}])
    (record,) = map(json.loads, printed(capsys, "show", run, "--json").splitlines())
    assert (record["prompt"], record["response"]) == ("a:", "12")
    assert (record["length"], record["num_trained"], record["reward"]) == (2, 1, None)


def test_samples_that_repeat_the_data_fill_no_disk(supervise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"q": f"{i}+1=", "a": str(i + 1)} for i in range(9)]
    run = supervise(rows, num_steps=1)
    size = list_rollouts(run)[0].path.stat().st_size
    monkeypatch.setattr(sample_files, "SFT_BYTES", int(2.5 * size))
    files = list_rollouts(supervise(rows, num_steps=5, attempt=2), all_attempts=True)
    assert [file.step for file in files] == [1, 1, 2]
