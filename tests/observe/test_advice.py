"""Warnings about rollouts: said when they hold, silent when they do not, and not at every step."""

from dataclasses import replace

import pytest

from fusionrl.observe.advice import AdviceSettings, Glimpse, RolloutFacts, Watches, likely_causes

SETTINGS = AdviceSettings(run="runs/a b", label_key="label", max_response_len=64)
EXAMPLE = Glimpse(7, "What is 3+4?", "\x1b[2Jten\n", "7", 0.0, 3, "completed")
NONE = dict.fromkeys(
    ("num_same_text", "num_failed", "num_at_context_limit", "num_without_label", "num_no_second_turn"), 0
)
COUNTS = {"num_samples": 32, "num_groups": 8, "num_equal_groups": 3, "num_trained": 32} | NONE
COUNTS |= {"num_truncated": 2, "num_at_response_limit": 2}
GOOD = RolloutFacts(**COUNTS, teaches_nothing=False, lowest=0.0, highest=1.0, example=EXAMPLE)
EQUAL = replace(GOOD, num_equal_groups=8, teaches_nothing=True, highest=0.0)


def causes(facts: RolloutFacts, **settings: object) -> str:
    return " | ".join(likely_causes(facts, replace(SETTINGS, **settings)))  # type: ignore[arg-type]


def warnings(facts: RolloutFacts, step: int = 1, **settings: object) -> list[str]:
    """What a new watch says after a rollout."""
    return Watches(replace(SETTINGS, **settings)).after_rollout(step, facts)  # type: ignore[arg-type]


def test_nothing_is_said_of_a_good_rollout() -> None:
    watches = Watches(SETTINGS)
    assert watches.after_rollout(1, GOOD) == []
    assert watches.after_step(1, {"train/grad_norm": 0.5, "eval/gsm8k/truncated_ratio": 0.5}) == []


def test_equal_rewards_name_cause_sample_and_command() -> None:
    (text,) = warnings(EQUAL, 4)
    assert "teaches nothing: all 8 groups have equal rewards (0 throughout)" in text
    assert "the reward is always 0" in text
    assert 'prompt "What is 3+4?"; answer "\\x1b[2Jten\\n" (3 tokens, completed); label "7"; reward 0' in text
    assert "fusionrl show 'runs/a b' --step 4 --all-equal" in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("changes", "settings", "cause"),
    [
        ({"num_groups": 32}, {}, "--n-samples-per-prompt 1: --advantage-estimator grpo"),
        ({"num_truncated": 24, "num_at_response_limit": 20}, {}, "75% of the answers were cut off at --rollout-max-r"),
        ({"num_truncated": 24, "num_at_context_limit": 20}, {"max_context_len": 99}, "at --rollout-max-context-len 99"),
        ({"num_truncated": 24, "num_at_response_limit": 0}, {}, "--max-turns"),
        ({"num_without_label": 32}, {}, "32 of 32 samples have no label: see column 'label'"),
        ({"num_without_label": 32}, {"label_key": None}, "have no label: give --label-key"),
        ({"num_without_label": 5}, {}, "5 of 32 samples have no label"),
        ({"num_same_text": 8}, {"temperature": 0.01}, "same text in 8 of 8 groups (--rollout-temperature 0.01)"),
        ({"lowest": 1.0, "highest": 1.0}, {}, "every answer gets 1: the prompts are too easy"),
        ({"highest": 1.0}, {}, "always answered right or always wrong"),
        ({"num_failed": 32}, {}, "every sample failed"),
        ({"num_trained": 0}, {}, "loss mask of 0"),
    ],
)
def test_causes(changes: dict, settings: dict, cause: str) -> None:
    facts = replace(EQUAL, **({"num_at_response_limit": 0} | changes))
    assert cause in causes(facts, **settings)
    ungrouped = replace(EQUAL, num_groups=32)
    assert "--n-samples-per-prompt" not in causes(ungrouped, estimator="remax", compares_siblings=False)


def test_the_same_again_only_after_some_steps() -> None:
    watches = Watches(SETTINGS)
    told = [step for step in range(1, 60) if watches.after_rollout(step, EQUAL)]
    assert told == [1, 21, 41]
    watches = Watches(SETTINGS)  # truncation is a cause in the first warning: it is no second one, nor a step later
    assert len(watches.after_rollout(1, replace(EQUAL, num_truncated=30, num_at_response_limit=30))) == 1
    assert watches.after_rollout(2, replace(GOOD, num_truncated=30, num_at_response_limit=30)) == []


def test_truncated_answers() -> None:
    facts = replace(GOOD, num_truncated=17, num_at_response_limit=17)
    (text,) = warnings(facts)
    assert "53% of the answers (17 of 32) were cut off at --rollout-max-response-len 64" in text
    assert warnings(replace(facts, num_truncated=16)) == warnings(facts, ignores_eos=True) == []


def test_no_room_for_a_second_turn() -> None:
    facts = replace(GOOD, num_no_second_turn=8, num_truncated=20)
    (text,) = warnings(facts)
    assert "25% of the samples (8 of 32) had no room for a second turn: --rollout-max-response-len 64" in text
    assert "--rollout-max-context-len is not given" in text
    assert "--rollout-max-context-len 128" in warnings(facts, max_context_len=128)[0]
    assert warnings(replace(GOOD, num_no_second_turn=3)) == []


def test_a_gradient_of_zero_tells_what_a_users_function_hid() -> None:
    facts = replace(EQUAL, teaches_nothing=False)  # as with --custom-advantage-function-path
    for norm, count in ((0.0, 1), (0.3, 0)):
        watches = Watches(SETTINGS)
        assert watches.after_rollout(1, facts) == []
        assert len(watches.after_step(1, {"train/grad_norm": norm})) == count
    watches = Watches(SETTINGS)
    watches.after_rollout(1, GOOD)
    assert watches.after_step(1, {"train/grad_norm": 0.0}) == [], "the groups differ: something else is wrong"


def test_evaluations_that_are_cut_off_or_not_scored() -> None:
    watches = Watches(SETTINGS)
    (text,) = watches.after_step(0, {"eval/a/truncated_ratio": 0.7, "eval/b/truncated_ratio": 0.1})
    assert "evaluation set a: 70%" in text and "--eval-max-response-len" in text
    assert len(watches.after_step(5, {"eval/a/truncated_ratio": 0.7, "eval/b/truncated_ratio": 0.6})) == 1
    (text,) = watches.after_step(6, {"eval/reward_timeout": 2.0, "eval/reward_crash": 1.0})
    assert text.startswith("3 answers of the evaluation got no reward")


def test_nothing_accepted() -> None:
    values = {"rollout/accepted": 0.0, "rollout/unfinished": 20.0, "rollout/below_threshold": 12.0}
    assert Watches(SETTINGS).after_step(1, values) == [], "another mode"
    watches = Watches(replace(SETTINGS, threshold=0.5))
    assert watches.after_step(1, values | {"rollout/accepted": 3.0}) == []
    (text,) = watches.after_step(2, values)
    assert "20 unfinished, 0 unsampled, 12 below threshold, 0 duplicates (--reject-sampling-threshold 0.5)" in text


def test_lost_rewards_are_told_at_the_first_rollout_that_lost_some() -> None:
    watches = Watches(replace(SETTINGS, reward_timeout_s=5.0))
    lost = replace(GOOD, num_timeouts=2)
    (text,) = watches.after_rollout(1, lost)
    assert text.startswith("2 of 32 samples got no reward within --reward-timeout-s 5; these are not trained on: see")
    assert watches.after_rollout(2, lost) == [], "not at every step"
    (text,) = warnings(replace(GOOD, num_crashes=1), failure_value=-1.0)
    assert text.startswith("1 of 32 samples ended the process") and "trained with --reward-failure-value -1" in text


def test_lost_rewards_are_the_first_cause_of_equal_ones() -> None:
    (text,) = warnings(replace(EQUAL, num_trained=0, num_failed=32, num_timeouts=32))
    assert "likely: 32 of 32 samples got no reward within --reward-timeout-s 60" in text
    assert "may not find the answer" not in text and "removed" not in text
    some = causes(replace(EQUAL, num_timeouts=3))
    assert some.startswith("3 of 32 samples got no reward") and "the reward is always 0" in some


def test_sampling_parameters_that_change_the_distribution_are_named() -> None:
    watches = Watches(SETTINGS)
    (text,) = watches.after_rollout(1, replace(GOOD, num_changed=4, changed_by=("min_new_tokens", "top_p")))
    assert "4 of 32 samples were sampled with min_new_tokens, top_p" in text and "loss_mask" in text
    assert watches.changed_by == ("min_new_tokens", "top_p")
    assert watches.after_rollout(2, GOOD) == [] and watches.changed_by == ()
