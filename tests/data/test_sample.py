"""`Sample`: what a response is made of stays aligned, and a file gives back what was written to it."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pytest

from fusionrl.data.sample import Sample, response_mask, reward_value, trained_amount
from fusionrl.data.token_versions import token_versions
from fusionrl.observe.json_values import json_line


def appended() -> Sample:
    sample = Sample(index=3, tokens=[1, 2, 3])
    sample.append_response_tokens(tokens=[10, 11], log_probs=[-0.1, -0.2], versions=4, text="ab")
    sample.append_response_tokens(tokens=[20, 21, 22], trainable=False, versions=4, text="tool")
    sample.append_response_tokens(
        tokens=np.array([12, 13]),
        log_probs=np.array([-0.3, -0.4]),
        versions=[4, 5],
        text="cd",
        finish_reason="length",
    )
    return sample


def test_turns_are_appended_in_line() -> None:
    sample = appended()
    assert list(sample.tokens) == [1, 2, 3, 10, 11, 20, 21, 22, 12, 13]
    assert sample.response_length == 7
    assert sample.prompt_length == 3
    assert sample.response == "abtoolcd"
    assert sample.loss_mask is not None
    assert list(sample.loss_mask) == [1, 1, 0, 0, 0, 1, 1]
    assert np.allclose(sample.rollout_log_probs, [-0.1, -0.2, 0, 0, 0, -0.3, -0.4])  # type: ignore[arg-type]
    assert sample.weight_versions is not None
    assert list(sample.weight_versions) == [4, 4, 4, 4, 4, 4, 5]
    assert sample.status == Sample.Status.TRUNCATED


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", "completed"), ("length", "truncated"), ("abort", "aborted"), (None, "pending")],
)
def test_the_finish_reason_gives_the_status(reason: str | None, status: str) -> None:
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[2], log_probs=[0.0], finish_reason=reason)
    assert sample.status == status


def versions(sample: Sample) -> list[int]:
    assert sample.weight_versions is not None
    return list(sample.weight_versions)


def test_tokens_of_a_tool_have_the_version_of_the_turn() -> None:
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[2], trainable=False)  # before any turn
    sample.append_response_tokens(tokens=[3], log_probs=[-1.0], meta_info={"weight_version": "5"})
    sample.append_response_tokens(tokens=[4, 5], trainable=False)
    sample.append_response_tokens(tokens=[6], log_probs=[-1.0])  # nobody says by which weights
    assert versions(sample) == [-1, 5, 5, 5, -1]


def test_an_answer_of_two_versions() -> None:
    """Weights that change while a request runs: its spans say where."""
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    meta = {"weight_version": "4", "weight_versions": spans, "finish_reason": {"type": "stop"}}
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[2] * 4, log_probs=[-1.0] * 4, meta_info=meta)  # the last one was cut off
    assert versions(sample) == [3, 3, 4, 4]


def test_what_slimes_functions_do_by_hand() -> None:
    """`update_from_meta_info` after each turn, when its tokens are in the sample."""
    sample = Sample(tokens=[1, 2, 3, 4], response_length=2)
    sample.update_from_meta_info(None, {"weight_version": "7", "finish_reason": {"type": "stop"}})
    assert versions(sample) == [7, 7] and sample.status == Sample.Status.COMPLETED
    sample.tokens, sample.response_length = [1, 2, 3, 4, 5, 6, 7], 5  # a token of a tool, and two of a turn
    answer = {"weight_version": "8", "completion_tokens": 2, "finish_reason": {"type": "length"}}
    sample.update_from_meta_info(None, answer)
    assert versions(sample) == [7, 7, -1, 8, 8] and sample.status == Sample.Status.TRUNCATED
    sample.update_from_meta_info(None, {"finish_reason": {"type": "something new"}})
    assert len(versions(sample)) == 5 and sample.status == Sample.Status.TRUNCATED
    sample.validate()


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"tokens": [1, 2], "log_probs": [-1.0]}, "2 response tokens, but 1 log-probs"),
        ({"tokens": [1, 2]}, "need the log-probs"),
        ({"tokens": [1, 2], "log_probs": [0.0, 0.0], "versions": [1, 2, 3]}, "shape"),
    ],
)
def test_an_append_that_does_not_fit_changes_nothing(values: dict[str, Any], part: str) -> None:
    sample = appended()
    before = sample.to_dict()
    with pytest.raises(ValueError, match=part):
        sample.append_response_tokens(**values)
    assert sample.to_dict() == before


def test_a_response_that_was_cut_by_hand_is_found() -> None:
    """A function that shortens the tokens and forgets the mask must not be trained on with a shifted mask."""
    sample = appended()
    sample.tokens, sample.response_length = sample.tokens[:-1], sample.response_length - 1
    with pytest.raises(ValueError, match="sample 3: loss_mask has 7 values for 6 response tokens"):
        sample.append_response_tokens(tokens=[1], log_probs=[0.0])
    with pytest.raises(ValueError, match="response_length 5 exceeds its 2 tokens"):
        Sample(tokens=[1, 2], response_length=5).validate()


def test_a_response_that_goes_on_is_read_by_the_teacher_anew() -> None:
    """A partial rollout's sample must not be trained with the teacher's word about its first part alone."""
    sample = appended()
    sample.teacher_log_probs = np.zeros(7, np.float32)
    sample.append_response_tokens(tokens=[], log_probs=[], finish_reason="length")
    assert sample.teacher_log_probs is not None
    sample.append_response_tokens(tokens=[5], log_probs=[-1.0])
    assert sample.teacher_log_probs is None
    sample.teacher_log_probs = [0.0] * 7
    with pytest.raises(ValueError, match="sample 3: teacher_log_probs has 7 values for 8 response tokens"):
        sample.validate()


def test_the_engines_experts_are_of_all_tokens_but_the_last() -> None:
    sample = appended()
    for count in (len(sample.tokens), len(sample.tokens) - 1):
        sample.rollout_routed_experts = np.zeros((count, 2, 4), np.int16)
        sample.validate()
    sample.append_response_tokens(tokens=[5], log_probs=[-1.0])
    assert sample.rollout_routed_experts is None
    sample.rollout_routed_experts = np.zeros((3, 2, 4), np.int16)
    with pytest.raises(ValueError, match=rf"rollout_routed_experts has 3 values for {len(sample.tokens)} tokens"):
        sample.validate()


def test_json_gives_back_the_same_sample() -> None:
    sample = appended()
    sample.prompt = [{"role": "user", "content": "é\n"}]
    sample.prompt_tokens = np.array([1, 2, 3], np.int32)
    sample.reward = {"accuracy": np.float32(0.1), "length": np.int64(3)}  # type: ignore[dict-item]
    sample.metadata = {"scores": np.arange(3), "nested": {"a": (1, 2)}}
    sample.teacher_log_probs = np.linspace(-3, 0, 7, dtype=np.float32)
    sample.rollout_routed_experts = np.arange((len(sample.tokens) - 1) * 6, dtype=np.int16).reshape(-1, 3, 2)
    sample.turns_left = 2  # type: ignore[attr-defined]
    back = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    own = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions", "teacher_log_probs", "prompt_tokens")
    for name in (*own, "rollout_routed_experts"):
        want, found = sample.array(name), back.array(name)
        assert found is not None and want is not None and found.dtype == want.dtype, name
        assert np.array_equal(found, want), name
    assert back.status is Sample.Status.TRUNCATED
    assert back.prompt == sample.prompt
    assert back.reward == {"accuracy": pytest.approx(0.1), "length": 3}
    assert back.metadata == {"scores": [0, 1, 2], "nested": {"a": [1, 2]}}
    assert back.turns_left == 2  # type: ignore[attr-defined]
    assert back.to_dict() == sample.to_dict()
    assert Sample.from_dict(json.loads(json_line(sample.to_row()))).to_dict() == sample.to_dict()
    empty = Sample.from_dict(json.loads(json.dumps(Sample().to_dict())))
    assert empty.loss_mask is None
    assert empty.rollout_log_probs is None
    assert empty.reward is None


def test_one_number_of_a_reward() -> None:
    def value(reward: Any, key: str | None = None) -> float:
        return Sample(index=9, reward=reward).get_reward_value(argparse.Namespace(reward_key=key))

    assert value(0.5) == 0.5
    assert value(True) == 1.0
    assert value(np.float32(2)) == 2.0
    assert value({"a": 1, "b": 2}, "b") == 2.0
    assert value({"a": 1, "b": 2}) == {"a": 1, "b": 2}  # as in slime: a hook may keep its data there
    for reward, key, part in [
        ({"a": 1}, "b", r"sample 9: --reward-key b: the reward has only the keys \['a'\]"),
        (None, None, "None is no number"),
        ("1", None, "'1' is no number"),
        (float("nan"), None, "nan is not finite"),
    ]:
        with pytest.raises(ValueError, match=part):
            value(reward, key)
    assert reward_value({"a": True}, "a", "--x") == 1.0
    with pytest.raises(ValueError, match=r"keys \['a', 'b'\]; choose one with --x"):
        reward_value({"a": 1, "b": 2}, None, "--x")


@pytest.mark.parametrize("version", ["default", "99999999999", "--3", "\u00b2", "", None])
def test_a_version_that_no_push_gave_is_the_checkpoint_s(version: Any) -> None:
    assert token_versions({"weight_version": version}, 2).tolist() == [0, 0]


def test_the_amount_that_is_trained_on_is_the_sum_of_the_mask() -> None:
    sample = Sample(tokens=[1, 2, 3, 4], response_length=3)
    for mask in (None, [1, 0, 1], np.array([0, 0, 0], np.int32), [0.5, 0.25, 0.1], [True, False, True]):
        sample.loss_mask = mask
        assert trained_amount(sample) == response_mask(sample).sum()
    sample.remove_sample = True
    assert trained_amount(sample) == 0
