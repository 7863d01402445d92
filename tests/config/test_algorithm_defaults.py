"""Flags that others set: the default loss of tokens of older weights, and the presets of --algorithm."""

import json
from pathlib import Path
from typing import Any

import pytest

from fusionrl.algorithms.estimators import ESTIMATORS, PRESETS
from fusionrl.checks.training import algorithm_errors
from fusionrl.config.config import Config
from fusionrl.config.parser import CommandLineError, parse_args
from fusionrl.config.pipeline import correction_text, corrects_by_default
from fusionrl.plan.render import preset_flags

RUN = ["--n-samples-per-prompt", "4", "--rollout-max-response-len", "100", "--rollout-batch-size", "8"]
OFF_POLICY = ("stream", "one-step-off", "async", "async-partial")


@pytest.mark.parametrize("pipeline", OFF_POLICY)
def test_it_is_on_where_older_tokens_are_trained(pipeline: str) -> None:
    config = parse_args(["--pipeline", pipeline, *RUN])
    assert config.algorithm.use_tis and corrects_by_default(config) and "use_tis" not in config.given()
    assert algorithm_errors(config) == [] and config.to_args().use_tis
    assert f"the default of --pipeline {pipeline}, off by --no-use-tis" in str(correction_text(config))


def test_every_estimator_has_it() -> None:
    for estimator in ESTIMATORS:
        assert Config.from_flat({"pipeline": "async", "advantage_estimator": estimator}).algorithm.use_tis, estimator


@pytest.mark.parametrize(
    "values",
    [
        {"pipeline": "on-policy"},
        {"pipeline": "stream", "update_weights_interval": 1},
        *({"mode": "sft"}, {"debug_train_only": True}, {"use_rollout_logprobs": True}, {"policy_loss": "dpo"}),
        *({name: "mine.py:f"} for name in ("custom_tis_function_path", "custom_policy_loss_path")),
        *({"loss_type": kind} for kind in ("custom_loss", "sft_loss")),
        *({"rejection_level": "sequence"}, {"tis_veto": 1e-4}),
    ],
)
def test_it_is_off_on_policy_and_beside_another_choice(values: dict[str, Any]) -> None:
    assert not Config.from_flat({"pipeline": "async"} | values).algorithm.use_tis


def test_a_flag_of_the_users_goes_before_it() -> None:
    off = parse_args(["--pipeline", "async", "--no-use-tis", *RUN])
    assert not off.algorithm.use_tis and "use_tis" in off.given()
    assert correction_text(off) == "tokens of older weights are taken for tokens of the newest"
    on = parse_args(["--pipeline", "async", "--use-tis", "--tis-clip", "3", *RUN])
    assert on.algorithm.use_tis and not corrects_by_default(on)
    assert "0 … 3" in (shown := str(correction_text(on))) and "default" not in shown
    assert parse_args(["--pipeline", "async", "--tis-clip", "3", *RUN]).algorithm.tis_clip == 3.0
    assert correction_text(parse_args(["--pipeline", "on-policy", "--use-tis", *RUN])) is None


@pytest.mark.parametrize("flags", [[], ["--no-use-tis"]], ids=str)
def test_a_runs_config_file_keeps_the_choice_and_not_the_default(flags: list[str], tmp_path: Path) -> None:
    """The file has every flag. Read back, its run is the same; another --pipeline brings its own default."""
    former = parse_args(["--pipeline", "async", *flags, *RUN])
    (tmp_path / "config.json").write_text(json.dumps(former.model_dump(mode="json")))
    again = parse_args(["--config", str(tmp_path / "config.json")])
    assert again.algorithm.use_tis == former.algorithm.use_tis
    assert corrects_by_default(again) == (not flags)
    in_turn = parse_args(["--config", str(tmp_path / "config.json"), "--pipeline", "on-policy"])
    assert not in_turn.algorithm.use_tis


def test_a_flag_that_was_given_stays_given(tmp_path: Path) -> None:
    """Also where it is the default: another --pipeline, or another choice beside it, does not take it away."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(parse_args(["--pipeline", "async", "--use-tis", *RUN]).to_file()))
    again = parse_args(["--config", str(file)])
    assert again.algorithm.use_tis and not corrects_by_default(again)
    file.write_text(json.dumps(again.to_file()))  # as a resume writes it
    in_turn = parse_args(["--config", str(file), "--pipeline", "on-policy"])
    assert in_turn.algorithm.use_tis and "use_tis" in in_turn.given()
    assert not parse_args(["--config", str(file), "--no-use-tis"]).algorithm.use_tis
    assert "given" not in parse_args(["--pipeline", "async", *RUN]).to_file()
    file.write_text(json.dumps({"given": ["use_tis"]}))
    with pytest.raises(CommandLineError, match="given"):
        parse_args(["--config", str(file)])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_configuration_without_contradictions(name: str) -> None:
    config = parse_args(["--algorithm", name, *RUN])
    flat = vars(config.to_args())
    assert {field: flat[field] for field in PRESETS[name]} == PRESETS[name]
    assert algorithm_errors(config) == []
    assert len(preset_flags(flat)) == len(PRESETS[name]) + (name == "dapo")


def test_what_is_given_counts() -> None:
    config = parse_args(["--algorithm", "dapo", "--eps-clip-high", "0.5", "--no-calculate-per-token-loss", *RUN])
    assert config.algorithm.eps_clip_high == 0.5 and not config.algorithm.calculate_per_token_loss
    assert config.reward.overlong_buffer_len == 20
    shown = preset_flags(vars(config.to_args()))
    assert "--eps-clip-high 0.5 (given; the preset has 0.28)" in shown and "--eps-clip 0.2" in shown
    assert "--no-calculate-per-token-loss (given; the preset has True)" in shown
    config = parse_args(["--algorithm", "grpo", "--no-use-kl-loss", *RUN])
    assert algorithm_errors(config) == [] and not config.algorithm.use_kl_loss
    with pytest.raises(ValueError, match="--algorithm grpoo: input should be 'grpo', 'dr_grpo'"):
        parse_args(["--algorithm", "grpoo"])
