"""The temperature of a sample: noted where it is sampled, resolved where it is trained on."""

from typing import Any

import numpy as np
import pytest

from fusionrl.data.sample import Sample
from fusionrl.data.sample_fields import CHANGED, note_request, note_temperature, scored_at, temperatures_of
from fusionrl.plan.balance import Balance, BatchPlan, SequenceCost
from tests.plan.shards import build_shards


def sample_of(length: int, temperature: Any = None) -> Sample:
    return Sample(tokens=[1, 2, *range(length)], response_length=length, temperature=temperature, index=3)


def test_what_a_request_says_is_what_its_log_probs_are_scored_at() -> None:
    assert (scored_at(0.7), scored_at(None), scored_at(0), scored_at(1e-9)) == (0.7, 1.0, 1.0, 1.0)
    for wrong in (-1, float("nan"), float("inf"), "1", True):
        with pytest.raises(ValueError, match="temperature"):
            scored_at(wrong)


def test_turns_at_several_temperatures_and_tools_between_them() -> None:
    sample = sample_of(3)
    note_temperature(sample, 0, 0.5)
    assert sample.temperature == 0.5 and temperatures_of(sample, 0.5) is None
    for length, start, temperature, wanted in (
        (9, 5, 1.25, [0.5] * 5 + [1.25] * 4),  # a tool's two tokens, and a turn of four
        (10, 9, 2, [0.5] * 5 + [1.25] * 4 + [2.0]),
        (12, None, None, [0.5] * 5 + [1.25] * 4 + [2.0] * 3),  # a tool's tokens behind the last turn
        (4, None, None, [0.5] * 4),  # a hook cuts the response
    ):
        sample = Sample.from_dict(sample.to_dict())
        sample.tokens, sample.response_length = list(range(2 + length)), length
        if start is not None:
            note_temperature(sample, start, temperature)
        assert np.allclose(temperatures_of(sample, 1.0), wanted)


def test_tokens_of_an_unknown_temperature_have_the_flag_s() -> None:
    sample = sample_of(4)
    note_temperature(sample, 2, 0.5)
    assert np.allclose(temperatures_of(sample, 0.8), [0.8, 0.8, 0.5, 0.5])
    assert temperatures_of(sample_of(4), 0.8) is None


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), [], "hot", [1.0, -2.0]])
def test_a_temperature_that_a_function_set_wrongly_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match="sample 3: temperature"):
        temperatures_of(sample_of(4, wrong), 1.0)


def test_a_shard_tells_of_temperatures_only_where_they_differ_from_the_flag() -> None:
    def shard(*temperatures: Any) -> Any:
        samples = [sample_of(2, temperature) for temperature in temperatures]
        for sample in samples:
            sample.group_index = 0
        plan = BatchPlan(len(samples), 1, 1, len(samples), 1)
        zeros = [0.0] * len(samples)
        balance = Balance(SequenceCost(linear=1.0, quadratic=0.0), 99)
        return build_shards(samples, zeros, zeros, plan, balance, rollout_id=0, temperature=0.8)[0]

    assert "temperatures" not in shard(None, 0.8).fields
    fields = shard(None, 1.1, [0.8, 0.3]).fields
    assert np.allclose(fields["temperatures"], [0.8, 0.8, 1.1, 1.1, 0.8, 0.3])


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_new_tokens": 0, "max_new_tokens": 9}, []),
        ({"frequency_penalty": 0.5}, ["frequency_penalty"]),
        ({"min_new_tokens": 3, "top_p": 0.9}, ["min_new_tokens", "top_p"]),
        ({"logit_bias": {"5": 1.0}}, ["logit_bias"]),
        ({"logit_bias": {}, "regex": None, "json_schema": ""}, []),
        ({"json_schema": "{}", "temperature": 0}, ["json_schema", "temperature"]),
        ({"repetition_penalty": 1.1, "presence_penalty": 0}, ["repetition_penalty"]),
    ],
)
def test_parameters_that_change_the_distribution_are_noted(params: dict[str, Any], names: list[str]) -> None:
    sample = sample_of(2)
    note_request(sample, 0, params)
    assert sample.metadata.get(CHANGED, []) == names
    note_request(sample, 0, {"min_p": 0.1})
    assert sample.metadata[CHANGED] == sorted([*names, "min_p"])
