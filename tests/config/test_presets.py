"""--algorithm NAME sets flags; those that are given count; the plan shows both."""

from __future__ import annotations

import pytest

from fusionrl.checks.algorithm import algorithm_errors
from fusionrl.config.parser import parse_args
from fusionrl.config.presets import PRESETS, described

COMMON = ["--n-samples-per-prompt", "4", "--rollout-max-response-len", "100"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_configuration_without_contradictions(name: str) -> None:
    config = parse_args(["--algorithm", name, *COMMON])
    flat = vars(config.to_args())
    assert {field: flat[field] for field in PRESETS[name]} == PRESETS[name]
    assert algorithm_errors(config) == []
    assert len(described(flat)) == len(PRESETS[name]) + (name == "dapo")


def test_what_is_given_counts() -> None:
    config = parse_args(["--algorithm", "dapo", "--eps-clip-high", "0.5", "--no-calculate-per-token-loss", *COMMON])
    assert config.algorithm.eps_clip_high == 0.5 and not config.algorithm.calculate_per_token_loss
    assert config.reward.overlong_buffer_len == 20
    shown = described(vars(config.to_args()))
    assert "--eps-clip-high 0.5 (given; the preset has 0.28)" in shown and "--eps-clip 0.2" in shown
    assert "--no-calculate-per-token-loss (given; the preset has True)" in shown
    config = parse_args(["--algorithm", "grpo", "--no-use-kl-loss", *COMMON])
    assert algorithm_errors(config) == [] and not config.algorithm.use_kl_loss
    with pytest.raises(ValueError, match="--algorithm grpoo: input should be 'grpo', 'dr_grpo'"):
        parse_args(["--algorithm", "grpoo"])
