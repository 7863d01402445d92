"""Checks of a rollout's flags, of sampling parameters, and of evaluation sets."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusionrl.algorithms.estimators import ACCURACY, NONZERO_STD
from fusionrl.base.wording import attempt
from fusionrl.buffer.schedule import read_schedule
from fusionrl.checks.data import check_set, prompt_columns, tokenizer_files
from fusionrl.checks.rewards import set_reward_errors
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import engine_groups
from fusionrl.config.eval_sets import EvalSet, eval_sets, readable_sets
from fusionrl.config.hooks import check_hook
from fusionrl.config.pipeline import knob_of
from fusionrl.config.resume_differences import as_written, flag_differences
from fusionrl.config.rollout import RolloutGroup
from fusionrl.config.run_parts import evaluates_by_default, generates, has_own_rollout, is_streamed
from fusionrl.data.sample_fields import GREEDY_BELOW
from fusionrl.observe.run_dir import last_config
from fusionrl.plan.layout import sequence_multiple
from fusionrl.plan.trained_parts import adapter_folders
from fusionrl.rewards.registry import LabelCheck
from fusionrl.rollout.generate_state import sampling_params
from fusionrl.rollout.sglang_rollout import eval_sampling_params

SESSIONS = "fusionrl.rollout.sessions.generate"


def rollout_errors(config: Config) -> list[str]:
    """List what is wrong with the flags of a rollout, and with flags of rewards that exclude each other."""
    errors: list[str] = []
    rollout, reward, model = config.rollout, config.reward, config.model
    if config.run.mode == "rl" and (rollout.rollout_top_p != 1.0 or rollout.rollout_top_k != -1):
        cure = "leave them at 1.0 and -1 (evaluation has its own flags)"
        errors.append(f"--rollout-top-p / --rollout-top-k: training on truncated samples would be biased; {cure}")
    tokens, cp = config.train.max_tokens_per_gpu, model.context_parallel_size
    multiple = sequence_multiple(cp, model.tensor_model_parallel_size)
    limit = rollout.rollout_max_context_len
    longest = limit or (config.data.rollout_max_prompt_len or 1) + (rollout.rollout_max_response_len or 0)
    padded = -(-longest // multiple) * multiple
    if config.run.mode == "rl" and padded > tokens * cp:
        sample = f"{longest} ({padded} with padding to a multiple of {multiple})" if padded != longest else str(longest)
        errors.append(
            f"--max-tokens-per-gpu {tokens} x --context-parallel-size {cp} = {tokens * cp} tokens of a micro-batch, but"
            f" a sample may have {sample}; raise it, or lower --rollout-max-response-len or --rollout-max-context-len"
        )
    if rollout.rollout_ignore_eos and (rollout.rollout_stop or rollout.rollout_stop_token_ids):
        errors.append("--rollout-ignore-eos makes no sense with --rollout-stop or --rollout-stop-token-ids")
    custom_generate = (rollout.custom_generate_function_path or "").replace(":", ".")
    if custom_generate == SESSIONS and rollout.agent_path is None:
        errors.append(f"--custom-generate-function-path {SESSIONS} runs your agent; name it with --agent-path")
    if rollout.agent_path is not None and not custom_generate and config.eval.eval_config is None:
        errors.append(f"--agent-path needs --custom-generate-function-path {SESSIONS}, which runs it; add it")
    no_reward = config.algorithm.use_opd and reward.rm_type is None and reward.custom_rm_path is None
    return errors + _filter_errors(rollout, no_reward) + _fraction_errors(config) + replay_errors(config)


# Flags in which a run may differ from the record that it follows: where files go, and what does not change events.
_MAY_DIFFER = {
    "replay_schedule",
    "save_hf",
    "save_debug_rollout_data",
    "save_interval",
    "no_save",
    "verify_checkpoints",
}


def replay_errors(config: Config) -> list[str]:
    """List why the record of --replay-schedule does not fit this run."""
    record = config.pipelining.replay_schedule
    if record is None or not is_streamed(config):
        return []
    flag = f"--replay-schedule {record}"
    if config.run.resume:
        return [f"{flag}: a record begins with the run, which --resume continues; leave one of them out"]
    if has_own_rollout(config):
        path = config.rollout.rollout_function_path
        return [f"{flag}: --rollout-function-path {path} makes groups in an order of its own; leave one of them out"]
    if (in_flight := knob_of(config, "in_flight")) == "in_place":
        return [
            f"{flag}: --in-flight in_place continues answers over the KV cache of older weights, which no request of"
            " this run can have; repeat runs with --in-flight retract or drain"
        ]
    if in_flight == "retract" and (agent := config.rollout.agent_path) is not None:
        return [
            f"{flag}: --agent-path {agent} asks over HTTP, and the record lacks the weight versions of its turns;"
            " repeat such runs with --in-flight drain"
        ]
    former = last_config(Path(record)) if Path(record).is_dir() else None
    if former is None:
        return [f"{flag}: it is not the folder of a run"]
    changed = [line for name, line in flag_differences(former, as_written(config)).items() if name not in _MAY_DIFFER]
    if changed:
        return [f"{flag}: its run has other flags ({'; '.join(changed)}); give the same ones"]
    errors: list[str] = []
    attempt(errors, lambda: read_schedule(Path(record), in_flight == "retract"))
    return errors


def agent_warnings(config: Config) -> list[str]:
    """A text where agents get other answers than they ask for."""
    free = "answers to a forced tool_choice, a response_format or a grammar may lack the call, or not be JSON"
    return [f"--agent-free-sampling: {free}"] if config.rollout.agent_free_sampling else []


def _fraction_errors(config: Config) -> list[str]:
    """Shares of a device's memory that no engine can take; SGLang takes any number, and runs out of memory later."""
    sources = {
        "--sglang-mem-fraction-static": config.passthrough.sglang,
        "--rm-server-args mem_fraction_static": config.reward.rm_server_args,
        "--opd-teacher-server-args mem_fraction_static": config.algorithm.opd_teacher_server_args,
    }
    groups = engine_groups(config) if config.cluster.engine_group else ()
    sources |= {f"--engine-group {group.name}: mem-fraction-static": group.server_args for group in groups}
    fractions = {flag: fields.get("mem_fraction_static") for flag, fields in sources.items()}
    return [
        f"{flag} {value}: it is a share of a device's memory; give more than 0 and less than 1, such as 0.8"
        for flag, value in fractions.items()
        if isinstance(value, int | float) and not 0 < value < 1
    ]


def _filter_errors(rollout: RolloutGroup, no_reward: bool) -> list[str]:
    path, samples = rollout.dynamic_sampling_filter_path, rollout.n_samples_per_prompt
    low, high = rollout.accuracy_lower_bound, rollout.accuracy_upper_bound
    if path not in (ACCURACY, NONZERO_STD):
        return []
    drops = f"--dynamic-sampling-filter-path {path.rpartition('.')[2]} drops every group"
    if no_reward:
        return [f"{drops} in a run without rewards (--use-opd alone); leave it out"]
    if path == NONZERO_STD and samples == 1:
        return [f"{drops} of --n-samples-per-prompt 1; use at least 2"]
    if path == ACCURACY and not any(low <= right / samples <= high for right in range(samples + 1)):
        limits = f"--accuracy-lower-bound {low} … --accuracy-upper-bound {high}"
        return [f"{drops} of --n-samples-per-prompt {samples}: no share is in {limits}; sample more, or widen them"]
    return []


# ------------------------------------------------------------------------------------------------ sampling
# The rules of `SamplingParams.verify` and `normalize` in SGLang that the bounds of the flags leave open.
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


def evaluation_errors(config: Config, warnings: list[str], vocab_size: int | None = None) -> list[str]:
    """Read the evaluation sets and list what is wrong with them; what is odd goes to `warnings`."""
    pairs, file = config.eval.eval_prompt_data, config.eval.eval_config
    if len(pairs) % 2:
        return [f"--eval-prompt-data {' '.join(pairs)}: give pairs of name and file"]
    if pairs and file is not None:
        return [f"--eval-config {file} and --eval-prompt-data exclude each other: the file names the sets"]
    try:
        sets = eval_sets(config.to_args())
    except ValueError as error:
        return str(error).splitlines()
    errors: list[str] = []
    files, names = tokenizer_files(config), [eval_set.name for eval_set in sets]
    for eval_set in sets:
        flag = "--eval-prompt-data" if file is None else f"--eval-config {file}: set {eval_set.name}:"
        where = f"{flag} {eval_set.name}:" if file is None else flag
        if not re.fullmatch(r"[\w-]+", eval_set.name, re.ASCII):
            errors.append(f"{where} the name of a set has letters, digits, '_' and '-' only; rename it")
        if names.count(eval_set.name) > 1:
            errors.append(f"{where} two sets have this name; rename one")
        if eval_set.adapter is not None and eval_set.adapter not in (names_known := tuple(adapter_folders(config))):
            known = f"the run has {', '.join(names_known)}" if names_known else "the run has none"
            errors.append(f"{where} adapter {eval_set.adapter!r}: {known} (--lora-adapters)")
        columns = prompt_columns(config).of_set(eval_set, eval_set.custom_generate_function_path is not None)
        key_flag, is_sft = "--eval-input-key" if file is None else "input_key", config.run.mode == "sft"
        ask_reward = LabelCheck.of_run(config, eval_set)
        check = check_set(config, files, eval_set.path, columns, (flag, key_flag), vocab_size, ask_reward)
        errors += check.errors
        warnings += check.warnings
        if not is_sft and evaluates_by_default(config):
            errors += eval_sampling_errors(config, eval_set, "" if file is None else flag, vocab_size)
        if file is not None and not is_sft:
            errors += [f"{flag} {error}" for error in _eval_set_errors(config, eval_set)]
    return errors


def _eval_set_errors(config: Config, eval_set: EvalSet) -> list[str]:
    """List what is wrong with a set of --eval-config; flags that it takes over are checked elsewhere."""
    errors = set_reward_errors(config, eval_set)
    if eval_set.max_response_len is None:
        errors.append("it has no max_response_len, and --rollout-max-response-len is not given")
    for field in ("custom_rm_path", "custom_generate_function_path"):
        path = getattr(eval_set, field)
        if path is not None and path != getattr(config.to_args(), field) and (error := check_hook(field, path)):
            errors.append(error)
    return errors


def keep_best_errors(config: Config) -> list[str]:
    """List what is wrong with --keep-best."""
    best = config.checkpoint.keep_best
    if best is None:
        return []
    names = [f"eval/{eval_set.name}/accuracy" for eval_set in readable_sets(config)]
    sets = {name.rsplit("/", 1)[0] for name in names}
    if config.eval.eval_interval is None or best.rsplit("/", 1)[0] not in sets:
        known = " or ".join(names) or "eval/<set>/accuracy of a set of --eval-prompt-data"
        return [f"--keep-best {best}: no evaluation gives that; it can be {known}, with --eval-interval"]
    return []
