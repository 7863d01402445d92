"""Sampling parameters that SGLang would refuse, or follow otherwise than meant: found before anything starts.

The rules are those of `SamplingParams.verify` and `normalize` in SGLang that the bounds of the flags leave open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fusionrl.config.config import Config
from fusionrl.config.eval_sets import EvalSet
from fusionrl.config.run_parts import generates
from fusionrl.data.sampling import GREEDY_BELOW
from fusionrl.rollout.evaluation import eval_sampling_params
from fusionrl.rollout.generate_state import sampling_params

MAX_STOPS = 32  # SGLang's MAX_STOP_COUNT
_ROLLOUT_FLAGS = {
    "top_k": "--rollout-top-k",
    "min_new_tokens": "--rollout-min-response-len",
    "max_new_tokens": "--rollout-max-response-len",
    "stop": "--rollout-stop",
    "stop_token_ids": "--rollout-stop-token-ids",
}


def rollout_sampling_errors(config: Config, vocab_size: int | None) -> list[str]:
    """List what is wrong with the sampling flags of a rollout. `vocab_size`: None is not known."""
    if not generates(config):
        return []
    errors = _errors(sampling_params(config.to_args()), vocab_size, _ROLLOUT_FLAGS)
    temperature, shortest = config.rollout.rollout_temperature, config.rollout.rollout_min_response_len
    if temperature < GREEDY_BELOW:
        errors.append(f"--rollout-temperature {temperature:g}: SGLang is greedy below {GREEDY_BELOW:g}; give more")
    if config.run.mode == "rl" and shortest:
        flag = f"--rollout-min-response-len {shortest} with --mode rl"
        errors.append(f"{flag}: sampling without the end token would bias training; leave it at 0")
    return errors


def eval_sampling_errors(config: Config, eval_set: EvalSet, where: str, vocab_size: int | None) -> list[str]:
    """List what is wrong with the sampling parameters of an evaluation set.

    where  begins a message about a key of --eval-config; empty: the sets are those of --eval-prompt-data
    """
    params = eval_sampling_params(sampling_params(config.to_args()), eval_set)
    names = {name: f"{where} {name}" for name in params} | {"max_new_tokens": f"{where} max_response_len"}
    if not where:
        names = dict(_ROLLOUT_FLAGS)
        for name, value in (("top_k", config.eval.eval_top_k), ("max_new_tokens", config.eval.eval_max_response_len)):
            names[name] = names[name] if value is None else names[name].replace("rollout", "eval")
    return _errors(params, vocab_size, names)


def _errors(params: Mapping[str, Any], vocab_size: int | None, names: Mapping[str, str]) -> list[str]:
    """List the values that SGLang refuses, or that end every answer at once; `names` of the parameters for messages."""
    errors, stops, longest = [], params.get("stop") or (), params["max_new_tokens"]
    if params["top_k"] == 0:
        errors.append(f"{names['top_k']} 0: give at least 1, or -1 for all tokens")
    if longest is not None and params["min_new_tokens"] > longest:
        limit = f"{names['max_new_tokens']} {longest}"
        errors.append(f"{names['min_new_tokens']} {params['min_new_tokens']}: it is over {limit}; lower it")
    if "" in stops:
        errors.append(f"{names['stop']} '': every answer would end after its first token; leave the empty string out")
    if len(stops) > MAX_STOPS:
        errors.append(f"{names['stop']}: {len(stops)} strings; SGLang takes {MAX_STOPS} at most")
    ids = [token for token in params.get("stop_token_ids") or () if token < 0 or token >= (vocab_size or math.inf)]
    if ids:
        known = f"0 to {vocab_size - 1}" if vocab_size else "0 or more"
        errors.append(f"{names['stop_token_ids']} {' '.join(map(str, ids))}: the model's token ids are {known}")
    return errors
