"""Sampling parameters that SGLang would refuse, or follow otherwise than meant: found before anything starts.

The rules follow `SamplingParams.verify` and `normalize` in SGLang; a test tries all flags against them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fusionrl.config.config import Config
from fusionrl.config.eval_sets import EvalSet
from fusionrl.config.run_parts import generates
from fusionrl.data.sampling import GREEDY_BELOW
from fusionrl.rollout.evaluation import eval_sampling_params
from fusionrl.rollout.generate_state import sampling_params

MAX_STOPS = 32  # SGLang's MAX_STOP_COUNT
_ROLLOUT_FLAGS = {
    "temperature": "--rollout-temperature",
    "top_p": "--rollout-top-p",
    "top_k": "--rollout-top-k",
    "min_new_tokens": "--rollout-min-response-len",
    "max_new_tokens": "--rollout-max-response-len",
    "stop": "--rollout-stop",
    "stop_token_ids": "--rollout-stop-token-ids",
}
_EVAL_FLAGS = {name: f"--eval-{name.replace('_', '-')}" for name in ("temperature", "top_p", "top_k")} | {
    "max_new_tokens": "--eval-max-response-len"
}


def rollout_sampling_errors(config: Config, vocab_size: int | None) -> list[str]:
    """List what is wrong with the sampling flags of a rollout.

    vocab_size  None: not known
    """
    if not generates(config):
        return []
    rollout = config.rollout
    errors = sampling_errors(sampling_params(config.to_args()), vocab_size, _ROLLOUT_FLAGS)
    if 0 < rollout.rollout_temperature < GREEDY_BELOW:
        errors.append(
            f"--rollout-temperature {rollout.rollout_temperature:g}: below {GREEDY_BELOW:g} SGLang takes the likeliest"
            f" token; give {GREEDY_BELOW:g} or more"
        )
    if config.run.mode == "rl" and rollout.rollout_min_response_len:
        errors.append(
            f"--rollout-min-response-len {rollout.rollout_min_response_len} with --mode rl: up to that length the"
            " engine samples from a distribution without the end token, so training would be biased; leave it at 0,"
            " and let the reward ask for longer answers"
        )
    return errors


def eval_sampling_errors(config: Config, eval_set: EvalSet, where: str, vocab_size: int | None) -> list[str]:
    """List what is wrong with the sampling parameters of an evaluation set.

    where  begins a message about a key of --eval-config; empty: the sets are those of --eval-prompt-data
    """
    params = eval_sampling_params(sampling_params(config.to_args()), eval_set)
    eval_flags = config.eval.model_dump()
    names = {
        name: f"{where} {'max_response_len' if name == 'max_new_tokens' else name}"
        if where
        else _EVAL_FLAGS[name]
        if name in _EVAL_FLAGS and eval_flags[_EVAL_FLAGS[name][2:].replace("-", "_")] is not None
        else _ROLLOUT_FLAGS.get(name, name)
        for name in params
    }
    return sampling_errors(params, vocab_size, names)


def sampling_errors(params: Mapping[str, Any], vocab_size: int | None, names: Mapping[str, str]) -> list[str]:
    """List the values that SGLang refuses, ignores, or that end every answer at once.

    names  of the parameters, for messages
    """
    errors = []

    def check(name: str, is_right: bool, rule: str) -> None:
        if not is_right:
            errors.append(f"{names.get(name, name)} {params[name]}: {rule}")

    temperature, most = params["temperature"], params["max_new_tokens"]
    check("temperature", math.isfinite(temperature) and temperature >= 0, "give a finite number of at least 0")
    check("top_p", 0 < params["top_p"] <= 1, "give a number above 0, and 1 at most")
    check("top_k", params["top_k"] == -1 or params["top_k"] >= 1, "give at least 1, or -1 for all tokens")
    if most is not None and params["min_new_tokens"] > most:
        limit = f"{names.get('max_new_tokens', 'max_new_tokens')} {most}"
        check("min_new_tokens", False, f"it is over {limit}; lower it, or raise that")
    if params.get("repetition_penalty") is not None:
        check("repetition_penalty", 0 < params["repetition_penalty"] <= 2, "give a number above 0, and 2 at most")
    errors += _stop_errors(params.get("stop") or (), names.get("stop", "stop"))
    ids = [token for token in params.get("stop_token_ids") or () if token < 0 or token >= (vocab_size or math.inf)]
    if ids:
        known = f"0 to {vocab_size - 1}" if vocab_size else "0 or more"
        displayed = " ".join(map(str, ids))
        errors.append(f"{names.get('stop_token_ids', 'stop_token_ids')} {displayed}: the model's token ids are {known}")
    return errors


def _stop_errors(stops: Sequence[str], name: str) -> list[str]:
    errors = []
    if "" in stops:
        errors.append(f"{name} '': every answer would end after its first token; leave the empty string out")
    if len(stops) > MAX_STOPS:
        errors.append(f"{name}: {len(stops)} strings; SGLang takes {MAX_STOPS} at most")
    return errors
