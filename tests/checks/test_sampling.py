"""Every sampling flag of rollouts and evaluations, at its bounds and beyond, against SGLang's own checks."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fusionrl.checks.rollout import eval_sampling_errors, rollout_sampling_errors
from fusionrl.checks.validate import validate
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import eval_sets
from fusionrl.rollout.generate_state import sampling_params
from fusionrl.rollout.sglang_rollout import eval_sampling_params

VOCAB = 512
NUMBERS = [-1.0, 0.0, 1e-9, 1e-6, 0.5, 1.0, 2.0, 1e9, math.inf, math.nan]
WHOLE = [-2, -1, 0, 1, 3, 5, VOCAB, 1 << 40]
STOPS: list[list[str]] = [[], ["x"], [""], ["x", ""], ["s"] * 32, ["s"] * 33]
IDS = [[], [0], [VOCAB - 1], [VOCAB], [-1], [3, 1 << 40]]
SWITCH = [True, False]
VALUES: dict[str, list[Any]] = {
    **{f"{run}_{name}": NUMBERS for run in ("rollout", "eval") for name in ("temperature", "top_p")},
    **{f"{run}_{name}": WHOLE for run in ("rollout", "eval") for name in ("top_k", "max_response_len")},
    **{"rollout_min_response_len": WHOLE, "rollout_stop": STOPS, "rollout_stop_token_ids": IDS},
    **{"rollout_ignore_eos": SWITCH, "rollout_skip_special_tokens": SWITCH},
}
OF_A_SET = {
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), NUMBERS),
    **dict.fromkeys(("top_k", "min_new_tokens", "max_response_len"), WHOLE),
    **{"stop": STOPS, "stop_token_ids": IDS},
}


@pytest.fixture
def base(tiny_model: Path, write_rows: Callable[..., Path]) -> dict[str, Any]:
    """A run of --mode reject-sampling, which trains nothing, so that every way of sampling is allowed."""
    rows = str(write_rows([{"input": "1+1=", "label": "2"}]))
    values = {"hf_checkpoint": str(tiny_model), "prompt_data": rows, "label_key": "label", "rm_type": "exact"}
    sizes = {"rollout_batch_size": 1, "n_samples_per_prompt": 2, "rollout_max_response_len": 4, "num_rollout": 1}
    return values | sizes | {"mode": "reject-sampling", "device": "cpu"}


@pytest.fixture
def of_eval(base: dict[str, Any]) -> dict[str, Any]:
    names = ("hf_checkpoint", "label_key", "rm_type", "device", "rollout_max_response_len")
    return {name: base[name] for name in names} | {"mode": "eval", "eval_prompt_data": ["own", base["prompt_data"]]}


def sglang_refuses(params: dict[str, Any]) -> bool:
    """Ask SGLang itself; an empty stop string and a stop token beyond the vocabulary it lets pass, or dies of."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    if "" in (params.get("stop") or ()) or any(not 0 <= token < VOCAB for token in params.get("stop_token_ids") or ()):
        return True
    try:
        asked = SamplingParams(**params)
        asked.verify(VOCAB)
        asked.normalize(SimpleNamespace(encode=lambda text, **_: list(text)))
    except ValueError:
        return True
    return False


def outcome(values: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """What is wrong, or the parameters that SGLang gets."""
    try:
        config = Config.from_flat(values)
        args = config.to_args()
        if config.run.mode != "eval":
            return rollout_sampling_errors(config, VOCAB), sampling_params(args)
        (own,) = eval_sets(args)
    except ValueError as error:
        return [str(error)], {}
    errors = eval_sampling_errors(config, own, "set own:" if config.eval.eval_config else "", VOCAB)
    return errors, eval_sampling_params(sampling_params(args), own)


def is_refused(values: dict[str, Any], name: str) -> bool:
    """Whether the values are refused, by this name, where SGLang would refuse them."""
    errors, params = outcome(values)
    assert all(name in error.replace("-", "_") for error in errors), errors
    assert errors or not sglang_refuses(params), params
    return bool(errors)


@pytest.mark.parametrize("flag", VALUES)
def test_what_sglang_refuses_is_refused_by_name_before_the_start(
    flag: str, base: dict[str, Any], of_eval: dict[str, Any]
) -> None:
    pytest.importorskip("sglang")
    values = of_eval if flag.startswith("eval_") else base
    verdicts = {is_refused(values | {flag: value}, flag) for value in VALUES[flag]}
    assert False in verdicts, "some value is good"


@pytest.mark.parametrize("key", OF_A_SET)
def test_the_same_holds_for_keys_of_eval_config(key: str, of_eval: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    path = of_eval.pop("eval_prompt_data")[1]
    for number, value in enumerate(OF_A_SET[key]):
        file = tmp_path / f"sets-{number}.yaml"
        file.write_text(yaml.safe_dump({"datasets": [{"name": "own", "path": path, key: value}]}))
        is_refused(of_eval | {"eval_config": str(file)}, key)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rollout_stop": [""]}, "--rollout-stop '': every answer would end after its first token"),
        ({"rollout_stop_token_ids": [2, 512]}, "--rollout-stop-token-ids 512: the model's token ids are 0 to 511"),
        ({"rollout_temperature": 1e-9}, "--rollout-temperature 1e-09: SGLang is greedy below 1e-06"),
        ({"rollout_min_response_len": 2, "mode": "rl"}, "--rollout-min-response-len 2 with --mode rl"),
        ({"rollout_min_response_len": 9}, "--rollout-min-response-len 9: it is over --rollout-max-response-len 4"),
        ({"rollout_top_k": 0}, "--rollout-top-k 0: give at least 1, or -1 for all tokens"),
    ],
)
def test_what_a_mistake_is_told(changes: dict[str, Any], text: str, base: dict[str, Any]) -> None:
    found = validate(Config.from_flat(base | changes))[1]
    assert any(text in error for error in found), found


def test_a_flag_of_rollouts_that_an_evaluation_takes_over_is_named_as_it_was_given(of_eval: dict[str, Any]) -> None:
    for flag in ("rollout_top_k", "eval_top_k"):
        (error,) = validate(Config.from_flat(of_eval | {flag: 0}))[1]
        assert error.startswith(f"--{flag.replace('_', '-')} 0:")
    assert validate(Config.from_flat(of_eval | {"eval_temperature": 0}))[1] == []
