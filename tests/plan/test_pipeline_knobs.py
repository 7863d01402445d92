"""The knobs of a run, and what does not go together with them."""

from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.config.pipeline import FULLY_ASYNC, describe_knobs, knobs_of, pause_mode, stream_errors
from fusionrl.config.run_parts import is_streamed
from fusionrl.pipeline.knobs import PIPELINES


def config(pipeline: str = "async", **values: Any) -> Config:
    return Config.from_flat({"pipeline": pipeline, "rollout_batch_size": 8, "n_samples_per_prompt": 4, **values})


# slime's fully asynchronous rollout function.
WORKER = {"pipeline": "on-policy", "rollout_function_path": FULLY_ASYNC[0]}


def mode_of(config: Config) -> str:
    return pause_mode(config, knobs_of(config, 3, 2) if is_streamed(config) else None)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_preset_is_its_knobs(name: str) -> None:
    knobs = knobs_of(config(name), 5, 2)
    assert {field: getattr(knobs, field) for field in PIPELINES[name]} == PIPELINES[name]
    assert (knobs.groups_per_fetch, knobs.samples_per_group, knobs.num_fetches) == (8, 4, 5)
    assert knobs.max_samples_in_flight == 2 * 512


def test_each_flag_changes_its_knob() -> None:
    given = {"max_staleness": 5, "admission_lead": 2.5, "update_weights_interval": 3, "in_flight": "in_place"}
    knobs = knobs_of(config(**given, at_deadline="drop", max_samples_in_flight=7), None, 1)
    assert {name: getattr(knobs, name) for name in given} == given
    assert (knobs.at_deadline, knobs.max_samples_in_flight, knobs.num_fetches) == ("drop", 7, None)
    parts = ("at most 5", "lead 2.5", "every 3 rollouts", "in_place", "drop", "7 samples")
    assert all(part in describe_knobs(knobs) for part in parts)
    assert knobs_of(config("one-step-off", max_staleness=0, in_flight="drain"), None, 1).admission_lead == 0.0, (
        "with the bound"
    )


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ({"pipeline": "on-policy"}, "abort"),
        ({"pipeline": "on-policy", "pause_generation_mode": "in_place"}, "in_place"),
        ({"pipeline": "async"}, "abort"),  # nothing is in flight
        ({"pipeline": "async-partial"}, "retract"),
        ({"pipeline": "async-partial", "in_flight": "in_place"}, "in_place"),
        ({"pipeline": "on-policy", "rollout_function_path": FULLY_ASYNC[0]}, "retract"),
        ({"pipeline": "on-policy", "rollout_function_path": FULLY_ASYNC[1], "pause_generation_mode": "abort"}, "abort"),
    ],
)
def test_what_a_push_does_to_running_requests(values: dict[str, Any], mode: str) -> None:
    assert mode_of(config(**values)) == mode


@pytest.mark.parametrize("path", ["mine.py:rollout", *FULLY_ASYNC])
def test_a_batch_function_goes_with_every_pipeline(path: str) -> None:
    """What it keeps under way goes on over a push: nobody can wait for it."""
    for name in PIPELINES:
        made = config(name, rollout_function_path=path)
        assert stream_errors(made) == [] and (name == "on-policy" or mode_of(made) == "retract")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"partial_rollout": True}, "--partial-rollout belongs to --pipeline on-policy: it keeps"),
        ({"colocate": True}, "nothing can run ahead; take --pipeline on-policy or stream"),
        ({"update_weights_interval": 3, "eval_interval": 4}, "--eval-interval 4 is not a multiple of the 3 rollouts"),
        ({"over_sampling_batch_size": 16}, "--over-sampling-batch-size 16: prompts that run ahead"),
        ({"pipeline": "async-partial", "pause_generation_mode": "in_place"}, "leave out --pause-generation-mode"),
        (WORKER | {"colocate": True}, "leave out --colocate"),
        (WORKER | {"dynamic_sampling_filter_path": "f.py:keep"}, "it asks no --dynamic-sampling-filter-path"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    (found,) = stream_errors(config(**values))
    assert words in found
    with pytest.raises(ValueError, match=r"--max-samples-in-flight 1025: the engines take 1024"):
        knobs_of(config(max_samples_in_flight=1025), None, 2)


@pytest.mark.parametrize(
    "values",
    [
        {"use_fault_tolerance": True, "rollout_all_samples_process_path": "a.py:b", "data_source_path": "a.py:B"},
        {"advantage_estimator": "remax"},
        {"pipeline": "stream", "colocate": True},
        {"pipeline": "stream", "over_sampling_batch_size": 16},
    ],
    ids=str,
)
def test_what_goes_together(values: dict[str, Any]) -> None:
    given = config(values.pop("pipeline", "async"), **values)
    assert stream_errors(given) == []
    knobs = knobs_of(given, None, 1)
    assert knobs.exclusive == ("colocate" in values)
    assert knobs.spare_groups == (8 if "over_sampling_batch_size" in values else 0)
    assert knobs.samples_per_group == given.rollout.n_samples_per_prompt + ("advantage_estimator" in values)
