"""Checks of the flags of a rollout: sampling, lengths of an answer, filters, supervision of the engines."""

from __future__ import annotations

from fusionrl.algorithms.estimators import ACCURACY
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import engine_groups
from fusionrl.config.groups.rollout import RolloutGroup
from fusionrl.config.presets import NONZERO_STD
from fusionrl.plan.layout import sequence_multiple

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
    if reward.rm_type and reward.custom_rm_path:
        errors.append("--rm-type and --custom-rm-path exclude each other; leave one out")
    custom_generate = (rollout.custom_generate_function_path or "").replace(":", ".")
    if custom_generate == SESSIONS and rollout.agent_path is None:
        errors.append(f"--custom-generate-function-path {SESSIONS} runs your agent; name it with --agent-path")
    if rollout.agent_path is not None and not custom_generate and config.eval.eval_config is None:
        errors.append(f"--agent-path needs --custom-generate-function-path {SESSIONS}, which runs it; add it")
    no_reward = config.algorithm.use_opd and reward.rm_type is None and reward.custom_rm_path is None
    return errors + _filter_errors(rollout, no_reward) + _fraction_errors(config)


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
