"""A sample's fields are lists to a hook, as in slime, and arrays to the rest."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest

from fusionrl.data.sample import Sample, Status, response_mask
from fusionrl.data.sample_json import pack_sample, unpack_sample

FIELDS = ("tokens", "loss_mask", "rollout_log_probs")


def packed_sample() -> Sample:
    """As the engines' answers make one: two tokens of a prompt, two of an answer."""
    sample = Sample(prompt="ab", tokens=np.array([5, 6], np.int32), prompt_tokens=np.array([5, 6], np.int32))
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.5, -0.25], versions=3, text="cd", finish_reason="stop")
    return sample


def test_what_a_hook_reads_are_lists_of_python_s_numbers() -> None:
    sample = packed_sample()
    assert all(isinstance(vars(sample)[name], np.ndarray) for name in FIELDS)
    assert sample.tokens == [5, 6, 7, 8] and type(sample.tokens[0]) is int
    assert sample.loss_mask == [1, 1] and sample.rollout_log_probs == [-0.5, -0.25]
    assert json.dumps(sample.tokens + [9]) == "[5, 6, 7, 8, 9]", "an array would add 9 to each"
    assert not Sample().tokens and Sample().loss_mask is None
    assert (sample.tokens or [1])[0] == 5, "an array has no truth value"


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
    for name, dtype in zip(FIELDS, (np.int32, np.int32, np.float32), strict=True):
        assert vars(sample)[name].dtype == dtype
    assert vars(sample)["tokens"].tolist() == [5, 6, 7, 8, 9, 10]
    assert response_mask(sample).tolist() == [1, 1, 0, 1]


def test_a_list_that_a_hook_holds_grows_with_the_sample() -> None:
    sample = packed_sample()
    held = sample.loss_mask
    sample.append_response_tokens(None, tokens=[9], trainable=False)
    assert held == [1, 1, 0] and sample.tokens == [5, 6, 7, 8, 9]
    assert vars(sample)["rollout_log_probs"].dtype == np.float32, "what nobody read stays packed"
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0]
    sample.append_response_tokens(None, text=None, meta_info={"finish_reason": {"type": "length"}, "prompt_tokens": 4})
    assert sample.status == Status.TRUNCATED and sample.prefix_cache_info.total_prompt_tokens == 4


def test_a_list_that_a_function_has_set_grows_in_its_own_variable() -> None:
    """As slime's example of tool calls does: it begins with [], appends, and writes its own variable back."""
    sample = Sample(tokens=[1, 2])
    sample.loss_mask, sample.rollout_log_probs = [], []
    masks, log_probs = sample.loss_mask, sample.rollout_log_probs
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-0.5, -1.0])
    sample.append_response_tokens(tokens=[5], trainable=False)
    assert masks == [1, 1, 0] and log_probs == [-0.5, -1.0, 0.0]
    sample.tokens, sample.loss_mask = [1, 2, 3, 4, 5], masks
    sample.validate()


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


def test_experts_that_an_answer_names() -> None:
    import base64
    from argparse import Namespace

    sample = Sample(tokens=[1])
    experts = np.arange(2 * 2 * 1, dtype=np.int32)
    meta = {"routed_experts": base64.b64encode(experts.tobytes()).decode(), "finish_reason": {"type": "stop"}}
    args = Namespace(routed_experts_size=(2, 1))
    sample.append_response_tokens(args, tokens=[2, 3], log_probs=[-1.0, -1.0], meta_info=meta)
    assert sample.rollout_routed_experts is not None and sample.rollout_routed_experts.shape == (2, 2, 1)
    with pytest.raises(ValueError, match="need the log-probs"):
        sample.append_response_tokens(args, tokens=[4])


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


def test_a_deep_copy_shares_nothing_that_can_change() -> None:
    sample = packed_sample()
    sample.metadata, sample.prompt = {"a": [1]}, [{"role": "user", "content": "ab"}]
    sample.reward, sample.label = {"score": 1.0}, ["x"]
    vars(sample)["of_a_hook"] = {"seen": sample}
    sample.loss_mask.append(0)  # type: ignore[union-attr]
    twice = copy.deepcopy([sample, sample])
    other = twice[0]
    assert twice[1] is other and vars(other)["of_a_hook"]["seen"] is other, "one copy of each"
    assert type(other) is Sample and vars(other).keys() == vars(sample).keys()
    assert other.status is Status.COMPLETED and other.metadata == {"a": [1]} and other.loss_mask == [1, 1, 0]
    for name, value in vars(sample).items():
        if isinstance(value, list | dict | np.ndarray):
            assert vars(other)[name] is not value, name
    other.metadata["a"].append(2)
    other.prompt[0]["content"] = "cd"  # type: ignore[index]
    vars(other)["tokens"][0] = 99
    assert sample.metadata == {"a": [1]} and sample.tokens[0] == 5
    assert sample.prompt == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize("wrong", [1 << 31, (1 << 32) + 7, -(1 << 40), 1 << 70])
def test_an_id_that_no_32_bits_hold_is_named(wrong: int) -> None:
    """It would be another token's id, in silence."""
    sample = Sample(index=4, tokens=[1, 2, wrong])
    said = f"sample 4: tokens holds {wrong} at place 2; it must be within -2147483648..2147483647"
    with pytest.raises(ValueError, match=said):
        sample.array("tokens")
    sample = Sample(index=4, tokens=[1])
    with pytest.raises(ValueError, match=f"sample 4: tokens holds {wrong} at place 0"):
        sample.append_response_tokens(None, tokens=[wrong], log_probs=[0.0])
    assert sample.tokens == [1] and sample.response_length == 0
    if abs(wrong) < 1 << 63:
        sample = Sample(index=4, tokens=np.array([1, 2, wrong]))
        with pytest.raises(ValueError, match=said):
            sample.append_response_tokens(None, tokens=[5], log_probs=[0.0])
        assert sample.response_length == 0 and sample.loss_mask is None


def test_versions_that_a_hook_holds_grow_with_the_sample() -> None:
    sample, turns = packed_sample(), ["3"]
    sample.weight_versions = turns
    sample.append_response_tokens(None, tokens=[9], log_probs=[-1.0], versions=4)
    assert sample.weight_versions is turns and turns == [-1, -1, 4, "3"]
    numbers = sample.weight_versions = [3, 3, 4]
    sample.append_response_tokens(None, tokens=[10], trainable=False)
    assert sample.weight_versions is numbers and numbers == [3, 3, 4, 4]


def test_versions_are_a_list_to_a_hook() -> None:
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
    copies = [copy.copy(sample) for _ in range(3)]
    for number, other in enumerate(copies):
        other.prefix_cache_info.add({"prompt_tokens": 10})
        other.spec_info.add({"spec_verify_ct": 2})
        other.apply_chat_template_kwargs["a"] += number
    assert [other.prefix_cache_info.total_prompt_tokens for other in (*copies, sample)] == [10, 10, 10, 0]
    assert [other.spec_info.spec_verify_ct for other in (*copies, sample)] == [2, 2, 2, 0]
    assert [other.apply_chat_template_kwargs["a"] for other in (*copies, sample)] == [1, 2, 3, 1]


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
