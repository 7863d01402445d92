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
    rollout, reward = config.rollout, config.reward
    if config.run.mode == "rl" and (rollout.rollout_top_p != 1.0 or rollout.rollout_top_k != -1):
        errors.append(
            "--rollout-top-p / --rollout-top-k: the engine's log-probs are those of the full distribution, so"
            " training on truncated samples would be biased; leave them at 1.0 and -1 (evaluation has its own flags)"
        )
    limit = rollout.rollout_max_context_len
    model = config.model
    cap = config.train.max_tokens_per_gpu * model.context_parallel_size
    multiple = sequence_multiple(model.context_parallel_size, model.tensor_model_parallel_size)
    longest = limit or (config.data.rollout_max_prompt_len or 1) + (rollout.rollout_max_response_len or 0)
    padded = -(-longest // multiple) * multiple
    if config.run.mode == "rl" and padded > cap:
        errors.append(
            f"--max-tokens-per-gpu {config.train.max_tokens_per_gpu} x --context-parallel-size"
            f" {model.context_parallel_size} = {cap} tokens of a micro-batch, but a sample may have {longest}"
            + (f" ({padded} with padding to a multiple of {multiple})" if padded != longest else "")
            + "; raise it, or lower --rollout-max-response-len or --rollout-max-context-len"
        )
    if rollout.rollout_ignore_eos and (rollout.rollout_stop or rollout.rollout_stop_token_ids):
        errors.append("--rollout-ignore-eos makes no sense with --rollout-stop or --rollout-stop-token-ids")
    if reward.rm_type and reward.custom_rm_path:
        errors.append("--rm-type and --custom-rm-path exclude each other; leave one out")
    if reward.group_rm and not reward.custom_rm_path:
        errors.append("--group-rm needs --custom-rm-path: the built-in rewards score one sample")
    custom_generate = (rollout.custom_generate_function_path or "").replace(":", ".")
    if custom_generate == SESSIONS and rollout.agent_path is None:
        errors.append(f"--custom-generate-function-path {SESSIONS} runs your agent; name it with --agent-path")
    if rollout.agent_path is not None and not custom_generate and config.eval.eval_config is None:
        errors.append(f"--agent-path needs --custom-generate-function-path {SESSIONS}, which runs it; add it")
    no_reward = config.algorithm.use_opd and reward.rm_type is None and reward.custom_rm_path is None
    errors += _filter_errors(rollout, no_reward)
    return errors + _fraction_errors(config)


def _fraction_errors(config: Config) -> list[str]:
    """Shares of a device's memory that no engine can take; SGLang takes any number, and runs out of memory later."""
    sources = {
        "--sglang-mem-fraction-static": config.passthrough.sglang,
        "--rm-server-args mem_fraction_static": config.reward.rm_server_args,
        "--opd-teacher-server-args mem_fraction_static": config.algorithm.opd_teacher_server_args,
    }
    groups = engine_groups(config) if config.cluster.engine_group else ()
    sources |= {f"--engine-group {group.name}: mem-fraction-static": group.server_args for group in groups}
    fractions = {
        flag: fields["mem_fraction_static"] for flag, fields in sources.items() if "mem_fraction_static" in fields
    }
    return [
        f"{flag} {value}: it is the share of a device's memory for weights and KV cache; give more than 0 and less"
        " than 1, such as 0.8"
        for flag, value in fractions.items()
        if isinstance(value, int | float) and not 0 < value < 1
    ]


def _filter_errors(rollout: RolloutGroup, no_reward: bool) -> list[str]:
    """Our filters that would drop every group."""
    path, samples = rollout.dynamic_sampling_filter_path, rollout.n_samples_per_prompt
    low, high = rollout.accuracy_lower_bound, rollout.accuracy_upper_bound
    if path not in (ACCURACY, NONZERO_STD):
        return []
    drops = f"--dynamic-sampling-filter-path {path.rpartition('.')[2]} drops every group"
    if no_reward:
        return [f"{drops} where there is no reward (--use-opd alone): no rollout would ever end; leave it out"]
    if path == NONZERO_STD and samples == 1:
        return [f"{drops} of --n-samples-per-prompt 1: no rollout would ever end; use at least 2"]
    if path == ACCURACY and not any(low <= right / samples <= high for right in range(samples + 1)):
        return [
            f"{drops} of --n-samples-per-prompt {samples}: no share of them is in --accuracy-lower-bound {low} …"
            f" --accuracy-upper-bound {high}, and no rollout would ever end; sample more, or widen the range"
        ]
    return []
