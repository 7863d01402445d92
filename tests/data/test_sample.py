"""`Sample`: a response's fields stay aligned, are lists to a hook and arrays to the rest, and survive a file."""

import argparse
import copy
import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest

from fusionrl.data.sample import Sample, Status, response_mask, reward_value, trained_amount
from fusionrl.data.sample_fields import token_versions
from fusionrl.data.sample_json import pack_sample, unpack_sample
from fusionrl.observe.formats import json_line


def appended() -> Sample:
    sample = Sample(index=3, tokens=[1, 2, 3])
    sample.append_response_tokens(tokens=[10, 11], log_probs=[-0.1, -0.2], versions=4, text="ab")
    sample.append_response_tokens(tokens=[20, 21, 22], trainable=False, versions=4, text="tool")
    arrays = {"tokens": np.array([12, 13]), "log_probs": np.array([-0.3, -0.4])}
    sample.append_response_tokens(**arrays, versions=[4, 5], text="cd", finish_reason="length")
    return sample


def test_turns_are_appended_in_line() -> None:
    sample = appended()
    assert sample.tokens == [1, 2, 3, 10, 11, 20, 21, 22, 12, 13]
    assert (sample.response, sample.response_length, sample.prompt_length) == ("abtoolcd", 7, 3)
    assert (sample.loss_mask, sample.weight_versions) == ([1, 1, 0, 0, 0, 1, 1], [4, 4, 4, 4, 4, 4, 5])
    assert sample.rollout_log_probs == pytest.approx([-0.1, -0.2, 0, 0, 0, -0.3, -0.4])
    assert sample.status == Sample.Status.TRUNCATED


def test_the_finish_reason_gives_the_status() -> None:
    for reason, status in {"stop": "completed", "length": "truncated", "abort": "aborted", None: "pending"}.items():
        sample = Sample(tokens=[1])
        sample.append_response_tokens(tokens=[2], log_probs=[0.0], finish_reason=reason)
        assert sample.status == status


def test_versions_of_a_tools_tokens_and_of_an_answer_of_two_versions() -> None:
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[2], trainable=False)  # before any turn
    sample.append_response_tokens(tokens=[3], log_probs=[-1.0], meta_info={"weight_version": "5"})
    sample.append_response_tokens(tokens=[4, 5], trainable=False)
    sample.append_response_tokens(tokens=[6], log_probs=[-1.0])  # nobody says by which weights
    assert sample.weight_versions == [-1, 5, 5, 5, -1]
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    meta = {"weight_version": "4", "weight_versions": spans, "finish_reason": {"type": "stop"}}
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[2] * 4, log_probs=[-1.0] * 4, meta_info=meta)  # the last one was cut off
    assert sample.weight_versions == [3, 3, 4, 4]


def test_what_slimes_functions_do_by_hand() -> None:
    """`update_from_meta_info` after each turn, when its tokens are in the sample."""
    sample = Sample(tokens=[1, 2, 3, 4], response_length=2)
    sample.update_from_meta_info(None, {"weight_version": "7", "finish_reason": {"type": "stop"}})
    assert sample.weight_versions == [7, 7] and sample.status == Sample.Status.COMPLETED
    sample.tokens, sample.response_length = [1, 2, 3, 4, 5, 6, 7], 5  # a token of a tool, and two of a turn
    answer = {"weight_version": "8", "completion_tokens": 2, "finish_reason": {"type": "length"}}
    sample.update_from_meta_info(None, answer)
    assert sample.weight_versions == [7, 7, -1, 8, 8] and sample.status == Sample.Status.TRUNCATED
    sample.update_from_meta_info(None, {"finish_reason": {"type": "something new"}})
    assert len(sample.weight_versions) == 5 and sample.status == Sample.Status.TRUNCATED
    sample.validate()


def test_an_append_that_does_not_fit_changes_nothing() -> None:
    sample = appended()
    before = sample.to_dict()
    for values, part in (
        ({"log_probs": [-1.0]}, "2 response tokens, but 1 log-probs"),
        ({}, "need the log-probs"),
        ({"log_probs": [0.0, 0.0], "versions": [1, 2, 3]}, "shape"),
    ):
        with pytest.raises(ValueError, match=part):
            sample.append_response_tokens(tokens=[1, 2], **values)
        assert sample.to_dict() == before


def test_a_response_that_was_cut_by_hand_is_found() -> None:
    """A function that shortens the tokens and forgets the mask must not be trained on with a shifted mask."""
    sample = appended()
    sample.tokens, sample.response_length = sample.tokens[:-1], sample.response_length - 1
    with pytest.raises(ValueError, match="sample 3: loss_mask has 7 values for 6 response tokens"):
        sample.append_response_tokens(tokens=[1], log_probs=[0.0])


def test_a_response_that_goes_on_is_read_by_the_teacher_anew() -> None:
    """A partial rollout's sample must not be trained with the teacher's word about its first part alone."""
    sample = appended()
    sample.teacher_log_probs = np.zeros(7, np.float32)
    sample.append_response_tokens(tokens=[], log_probs=[], finish_reason="length")
    assert sample.teacher_log_probs is not None
    sample.append_response_tokens(tokens=[5], log_probs=[-1.0])
    assert sample.teacher_log_probs is None


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
    own = "tokens loss_mask rollout_log_probs weight_versions teacher_log_probs prompt_tokens rollout_routed_experts"
    for name in own.split():
        want, found = sample.array(name), back.array(name)
        assert found is not None and want is not None and found.dtype == want.dtype, name
        assert np.array_equal(found, want), name
    assert back.status is Sample.Status.TRUNCATED and back.prompt == sample.prompt
    assert back.reward == {"accuracy": pytest.approx(0.1), "length": 3}
    assert back.metadata == {"scores": [0, 1, 2], "nested": {"a": [1, 2]}}
    assert back.turns_left == 2  # type: ignore[attr-defined]
    assert back.to_dict() == sample.to_dict()
    assert Sample.from_dict(json.loads(json_line(sample.to_row()))).to_dict() == sample.to_dict()
    empty = Sample.from_dict(json.loads(json.dumps(Sample().to_dict())))
    assert empty.loss_mask is empty.rollout_log_probs is empty.reward is None


def test_one_number_of_a_reward() -> None:
    def value(reward: Any, key: str | None = None) -> float:
        return Sample(index=9, reward=reward).get_reward_value(argparse.Namespace(reward_key=key))

    assert [value(0.5), value(True), value(np.float32(2)), value({"a": 1, "b": 2}, "b")] == [0.5, 1.0, 2.0, 2.0]
    assert value({"a": 1, "b": 2}) == {"a": 1, "b": 2}  # as in slime: a hook may keep its data there
    named = ({"a": 1}, "b", r"sample 9: --reward-key b: the reward has only the keys \['a'\]")
    for reward, key, part in (named, ("1", None, "'1' is no number"), (float("nan"), None, "nan is not finite")):
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


FIELDS = ("tokens", "loss_mask", "rollout_log_probs")


def packed_sample() -> Sample:
    """As the engines' answers make one: two tokens of a prompt, two of an answer."""
    sample = Sample(prompt="ab", tokens=np.array([5, 6], np.int32), prompt_tokens=np.array([5, 6], np.int32))
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.5, -0.25], versions=3, text="cd", finish_reason="stop")
    return sample


def test_what_is_appended_in_place_stays_and_is_packed() -> None:
    sample = packed_sample()
    sample.tokens.append(9)  # type: ignore[union-attr]
    sample.tokens += [10]  # type: ignore[operator,assignment]
    sample.loss_mask.extend([0, 1])  # type: ignore[union-attr]
    sample.rollout_log_probs += [0.0, -0.125]  # type: ignore[operator,assignment]
    sample.response_length = 4
    sample.weight_versions = []
    sample.validate()
    sample.pack()
    assert sample.weight_versions is None
    assert [vars(sample)[name].dtype for name in FIELDS] == [np.int32, np.int32, np.float32]
    assert vars(sample)["tokens"].tolist() == [5, 6, 7, 8, 9, 10]
    assert response_mask(sample).tolist() == [1, 1, 0, 1]


def test_a_list_that_a_hook_holds_grows_with_the_sample() -> None:
    sample = packed_sample()
    held = sample.loss_mask
    sample.append_response_tokens(None, tokens=[9], trainable=False)
    assert held == [1, 1, 0] and sample.tokens == [5, 6, 7, 8, 9]
    assert vars(sample)["rollout_log_probs"].dtype == np.float32, "an unread field stays packed"
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0]
    sample.append_response_tokens(None, text=None, meta_info={"finish_reason": {"type": "length"}, "prompt_tokens": 4})
    assert sample.status == Status.TRUNCATED and sample.prefix_cache_info.total_prompt_tokens == 4


def test_fusionrl_s_own_reading_makes_no_lists() -> None:
    sample = packed_sample()
    sample.validate()
    assert sample.num_tokens == 4 and sample.prompt_length == 2 and sample.effective_response_length == 2
    assert sample.array("tokens") is vars(sample)["tokens"] and response_mask(sample).sum() == 2
    sample.to_dict(), copy.deepcopy(sample), pickle.loads(pickle.dumps(sample)), pack_sample(sample)
    assert all(isinstance(vars(sample)[name], np.ndarray) for name in FIELDS)


def test_a_mask_of_shares_and_what_is_no_number() -> None:
    sample = Sample(tokens=[1, 2], loss_mask=[0.5, 1], response_length=2)
    sample.pack()
    assert vars(sample)["loss_mask"].dtype == np.float32 and sample.loss_mask == [0.5, 1.0]
    sample.pack()
    sample.append_response_tokens(None, tokens=[9], log_probs=[-1.0])
    sample.append_response_tokens(None, tokens=[10], trainable=False)
    assert sample.effective_response_length == 2.5 and type(packed_sample().effective_response_length) is int
    assert Sample.from_dict(sample.to_dict()).loss_mask == sample.loss_mask == [0.5, 1, 1, 0]
    assert vars(Sample.from_dict(packed_sample().to_dict()))["loss_mask"].dtype == np.int32
    strange = Sample(tokens=["a"], response_length=1)  # type: ignore[list-item]
    strange.pack()
    assert strange.tokens == ["a"], "left for the check that names the function"


def test_slime_s_fields_and_methods() -> None:
    sample = Sample(multimodal_inputs={"images": []}, rollout_id=3)
    assert sample.apply_chat_template_kwargs == {} and sample.non_generation_time == 0.0
    assert sample.rollout_top_p_token_ids is None and sample.multimodal_train_input_id is None
    sample.spec_info.add({"spec_accept_token_num": 3, "spec_draft_token_num": 4, "completion_tokens": 6})
    assert isinstance(sample.spec_info, Sample.SpecInfo) and sample.spec_info.spec_accept_rate == 0.75
    sample.prefix_cache_info.add({"cached_tokens": 1, "prompt_tokens": 4})
    for back in (Sample.from_dict(json.loads(json.dumps(sample.to_dict()))), unpack_sample(pack_sample(sample))):
        assert back.spec_info == sample.spec_info and back.prefix_cache_info.prefix_cache_hit_rate == 0.25
        assert back.multimodal_inputs == {"images": []}
    assert "spec_info" not in Sample().to_dict(), "what is not used is not written"
    assert dataclasses.replace(sample, prompt="x").prompt == "x"


def test_another_prompt_forgets_the_ids_of_the_first() -> None:
    sample = packed_sample()
    sample.prompt = "ab"
    assert sample.prompt_tokens is not None
    sample.prompt = "another"
    assert sample.prompt_tokens is None and copy.deepcopy(sample).prompt == "another"


def test_no_sample_changes_by_another_one_s_append() -> None:
    """Siblings of a group, the greedy baseline and the prompt's own ids may be one list in a hook."""
    prompt_ids = [5, 6]
    first, second = Sample(tokens=prompt_ids), Sample(tokens=prompt_ids)
    first.append_response_tokens(None, tokens=[7], log_probs=[-1.0])
    third = copy.copy(first)
    fourth = Sample(tokens=first.tokens)
    first.append_response_tokens(None, tokens=[8], log_probs=[-1.0])
    third.append_response_tokens(None, tokens=[9], log_probs=[-1.0])
    assert prompt_ids == [5, 6] and second.tokens == [5, 6] and fourth.tokens == [5, 6, 7]
    assert first.tokens == [5, 6, 7, 8] and third.tokens == [5, 6, 7, 9]
    fifth = packed_sample()
    sixth = copy.copy(fifth)
    fifth.tokens.append(1)  # type: ignore[union-attr]
    assert sixth.tokens == [5, 6, 7, 8]
    for back in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert type(back.tokens) is list and back.tokens == first.tokens


@pytest.mark.parametrize("wrong", [1 << 31, -(1 << 40), 1 << 70])
def test_an_id_that_no_32_bits_hold_is_named(wrong: int) -> None:
    """It would be another token's id, in silence."""
    said = f"sample 4: tokens holds {wrong} at place 2; it must be within -2147483648..2147483647"
    with pytest.raises(ValueError, match=said):
        Sample(index=4, tokens=[1, 2, wrong]).array("tokens")
    sample = Sample(index=4, tokens=[1])
    with pytest.raises(ValueError, match=f"sample 4: tokens holds {wrong} at place 0"):
        sample.append_response_tokens(None, tokens=[wrong], log_probs=[0.0])
    assert sample.tokens == [1] and sample.response_length == 0
    if abs(wrong) < 1 << 63:
        with pytest.raises(ValueError, match=said):
            Sample(index=4, tokens=np.array([1, 2, wrong])).append_response_tokens(None, tokens=[5], log_probs=[0.0])


def test_versions_are_a_list_to_a_hook_and_grow_with_the_sample() -> None:
    sample, turns = packed_sample(), ["3"]
    sample.weight_versions = turns
    sample.append_response_tokens(None, tokens=[9], log_probs=[-1.0], versions=4)
    assert sample.weight_versions is turns and turns == [-1, -1, 4, "3"]
    sample = packed_sample()
    assert sample.weight_versions == [3, 3]
    sample.weight_versions.append("4")  # type: ignore[union-attr]
    sample.tokens, sample.response_length = [5, 6, 7, 8, 9], 3
    sample.loss_mask, sample.rollout_log_probs = [1, 1, 1], [0.0, 0.0, 0.0]
    sample.validate()
    other = copy.deepcopy(sample)
    sample.append_response_tokens(None, tokens=[10], log_probs=[-1.0], versions=5)
    assert sample.weight_versions == [3, 3, -1, 5, "4"], "the text stays: `fill_versions` finds its token"
    other.update_from_meta_info(None, {"weight_version": "4", "finish_reason": {"type": "stop"}})
    assert other.weight_versions == [3, 3, 4]


def test_a_copy_counts_its_own_requests() -> None:
    sample = Sample(apply_chat_template_kwargs={"a": 1})
    other = copy.copy(sample)
    other.prefix_cache_info.add({"prompt_tokens": 10})
    other.spec_info.add({"spec_verify_ct": 2})
    other.apply_chat_template_kwargs["a"] += 1
    for one, counts in ((sample, (0, 0, 1)), (other, (10, 2, 2))):
        cached, verified = one.prefix_cache_info.total_prompt_tokens, one.spec_info.spec_verify_ct
        assert (cached, verified, one.apply_chat_template_kwargs["a"]) == counts


def test_none_in_a_field_of_slime_s_is_its_default() -> None:
    sample = Sample(apply_chat_template_kwargs=None)  # type: ignore[arg-type]
    sample.spec_info = sample.prefix_cache_info = None  # type: ignore[assignment]
    assert sample.apply_chat_template_kwargs == {} and sample.spec_info == Sample.SpecInfo()
    assert "prefix_cache_info" not in pack_sample(sample) and "spec_info" not in sample.to_dict()
    for name in ("tokens", "prompt", "spec_info"):
        assert not hasattr(object.__new__(Sample), name)


def test_a_list_that_two_samples_share_is_named_as_the_cause() -> None:
    first = Sample(tokens=[1], loss_mask=[], rollout_log_probs=[])
    second = dataclasses.replace(first, index=1)
    first.append_response_tokens(tokens=[2], log_probs=[-1.0])
    with pytest.raises(ValueError, match="sample 1: loss_mask has 1 values .* another sample has the same list"):
        second.append_response_tokens(tokens=[2], log_probs=[-1.0])
