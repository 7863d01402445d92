"""Entries of rollouts and of evaluations."""

from __future__ import annotations

from fusionrl.observe.metric_entries.entry import Entry, Table

ROLLOUTS: Table = {
    "rollout/raw_reward": Entry(
        "reward",
        "Mean reward as the reward function gave it, before penalties and normalization; 0 for a failed sample.",
        "buffer/rollout_report.py",
    ),
    "rollout/raw_reward_std": Entry(
        "reward", "Standard deviation of these rewards over the samples.", "buffer/rollout_report.py"
    ),
    "rollout/accuracy": Entry("share", "Share of samples with a raw reward of at least 1.", "buffer/rollout_report.py"),
    "rollout/zero_std_groups": Entry(
        "share",
        "Share of groups whose raw rewards are all equal: of them nothing is learnt by estimators that compare "
        "within a group. Samples without a reward do not count.",
        "buffer/rollout_report.py",
    ),
    "rollout/response_len/mean": Entry(
        "tokens", "Mean length of the responses, tools' tokens included.", "buffer/rollout_report.py"
    ),
    "rollout/response_len/max": Entry("tokens", "The longest response.", "buffer/rollout_report.py"),
    "rollout/truncated_ratio": Entry(
        "share", "Share of responses that were cut off by the length limit.", "buffer/rollout_report.py"
    ),
    "rollout/failed": Entry(
        "samples", "Samples that failed or were aborted; they are not trained on.", "buffer/rollout_report.py"
    ),
    "rollout/timed_out": Entry(
        "samples", "Samples that passed the time limit; they failed.", "buffer/rollout_report.py", "--sample-timeout"
    ),
    "rollout/num_samples": Entry("samples", "Samples of the rollout.", "buffer/rollout_report.py"),
    "rollout/num_attempts": Entry(
        "attempts", "Attempts of the rollout: samples that share a rollout_id are one.", "buffer/rollout_report.py"
    ),
    "rollout/num_tokens": Entry(
        "tokens", "Response tokens of the rollout, tools' tokens included.", "buffer/rollout_report.py"
    ),
    "rollout/session_rewrites": Entry(
        "segments",
        "Samples that began where an agent behind the session proxy rewrote its history (docs/guides/sessions.md).",
        "buffer/rollout_report.py",
        "--agent-path",
    ),
    "rollout/reward_timeout": Entry(
        "samples",
        "Samples without a reward because the reward function took too long.",
        "rewards/pool.py",
        "when it happens",
    ),
    "rollout/reward_crash": Entry(
        "samples",
        "Samples without a reward because the reward function took its process down.",
        "rewards/pool.py",
        "when it happens",
    ),
    "rollout/reward_error": Entry(
        "samples",
        "Samples whose reward function raised, or returned no finite number.",
        "rewards/pool.py",
        "--reward-failure-value",
    ),
    "rollout/code_failed/<reason>": Entry(
        "samples",
        "Samples with a program that failed for this reason (docs/guides/rewards.md).",
        "buffer/rollout_report.py",
        "--rm-type code, when it happens",
    ),
    "rollout/spec_accept_rate": Entry(
        "share",
        "Drafted tokens that the model took, of all that were drafted (docs/guides/engines.md).",
        "buffer/rollout_report.py",
        "--sglang-speculative-algorithm",
    ),
    "rollout/spec_accept_length": Entry(
        "tokens",
        "Mean number of tokens that an engine's forward pass made of a response, the drafted ones included.",
        "buffer/rollout_report.py",
        "--sglang-speculative-algorithm",
    ),
    "rollout/reward_<part>": Entry(
        "reward",
        "Mean of one part of a weighted sum of rewards, before its weight.",
        "buffer/rollout_report.py",
        "several rewards in --rm-type",
    ),
    "rollout/<set>/raw_reward": Entry(
        "reward", "As rollout/raw_reward, of one set.", "buffer/rollout_report.py", "several --prompt-data"
    ),
    "rollout/<set>/accuracy": Entry(
        "share", "As rollout/accuracy, of one set.", "buffer/rollout_report.py", "several --prompt-data"
    ),
    "rollout/<set>/num_samples": Entry(
        "samples", "Samples of one set.", "buffer/rollout_report.py", "several --prompt-data"
    ),
    "rollout/opd_reverse_kl": Entry(
        "nats",
        "Mean over trained tokens of log p(engine) - log p(teacher): an estimate of KL(policy || teacher).",
        "buffer/token_metrics.py",
        "samples with teacher_log_probs",
    ),
    "rollout/dynamic_filter/drop_<reason>": Entry(
        "groups",
        "Groups dropped for that reason, as a user's rollout function counts them by slime's `MetricGatherer`.",
        "compat/slime/api/filters.py",
        "a function of the user that reports it",
    ),
    "rollout/dropped_<reason>": Entry(
        "groups",
        "Groups that were generated and not used, by reason: that of --dynamic-sampling-filter-path, `filtered` "
        "without one, `surplus` where there were more than enough.",
        "rollout/sglang_rollout.py",
        "when it happens",
    ),
    "rollout/staleness/token_mean": Entry(
        "pushes",
        "Staleness of a trained token: pushes between the weights that sampled it and those that train on it; 0 where"
        " they are the same. Mean over the trained tokens.",
        "buffer/token_metrics.py",
        "known weight versions",
    ),
    "rollout/staleness/token_max": Entry(
        "pushes", "Staleness of the oldest trained token.", "buffer/token_metrics.py", "known weight versions"
    ),
    "rollout/staleness/sample_mean": Entry(
        "pushes",
        "Mean over the samples; a sample is as stale as its oldest trained token.",
        "buffer/token_metrics.py",
        "known weight versions",
    ),
    "rollout/staleness/sample_max": Entry(
        "pushes", "As rollout/staleness/token_max.", "buffer/token_metrics.py", "known weight versions"
    ),
    "rollout/staleness/tokens/<k>": Entry(
        "share",
        "Share of trained tokens with staleness k; 8 also counts what is older.",
        "buffer/token_metrics.py",
        "known weight versions, where there are such tokens; k = 0 always",
    ),
    "rollout/staleness/samples/<k>": Entry(
        "share",
        "Share of samples with staleness k; 8 also counts what is older.",
        "buffer/token_metrics.py",
        "known weight versions, where there are such samples; k = 0 always",
    ),
    "rollout/staleness/unknown": Entry(
        "share",
        "Share of trained tokens whose weight version is not known; the metrics above leave them out.",
        "buffer/token_metrics.py",
        "when it happens",
    ),
    "rollout/steps_since_sampled/mean": Entry(
        "steps",
        "Optimizer steps between the weights that sampled a trained token and those that train it, mean over the"
        " tokens. Of a rollout's n steps the first trains tokens of the newest push at 0, the last at n - 1.",
        "buffer/staleness.py",
        "known weight versions, --mode rl",
    ),
    "rollout/steps_since_sampled/max": Entry(
        "steps", "The same of the oldest token.", "buffer/staleness.py", "known weight versions, --mode rl"
    ),
    "rollout/partial_samples": Entry(
        "samples",
        "Unfinished samples that the next rollout continues.",
        "rollout/sglang_rollout.py",
        "--partial-rollout",
    ),
    "rollout/engines_died": Entry(
        "engines", "Engines found dead during the rollout.", "runtime/engine_pool.py", "--use-fault-tolerance"
    ),
    "rollout/answers_refused": Entry(
        "answers",
        "Responses of engines that did not match their request (docs/guides/security.md); each request was sent again.",
        "rollout/generate_state.py",
        "when it happens",
    ),
    "rollout/requests_retried": Entry(
        "requests",
        "Requests that were sent again, by the client and the router.",
        "rollout/generate_state.py",
        "--use-fault-tolerance",
    ),
    "rollout/tokens_kept": Entry(
        "tokens",
        "Tokens of engines that died which another engine continued.",
        "rollout/generate_state.py",
        "--use-fault-tolerance",
    ),
    "rollout/considered": Entry(
        "samples", "Samples of the rollout.", "buffer/reject_sampling.py", "--mode reject-sampling"
    ),
    "rollout/unfinished": Entry(
        "samples",
        "Not accepted: truncated, aborted or failed, or no token to train on.",
        "buffer/reject_sampling.py",
        "--mode reject-sampling",
    ),
    "rollout/unsampled": Entry(
        "samples",
        "Not accepted: trained tokens occur in no response of the engines (a tool's text without a mask).",
        "buffer/reject_sampling.py",
        "--mode reject-sampling",
    ),
    "rollout/below_threshold": Entry(
        "samples",
        "Not accepted: reward below --reject-sampling-threshold.",
        "buffer/reject_sampling.py",
        "--mode reject-sampling",
    ),
    "rollout/duplicates": Entry(
        "samples",
        "Not accepted: the same answer to the same prompt is in the file.",
        "buffer/reject_sampling.py",
        "--mode reject-sampling",
    ),
    "rollout/surplus": Entry(
        "samples",
        "Not accepted: the prompt has --reject-sampling-per-prompt better ones.",
        "buffer/reject_sampling.py",
        "--mode reject-sampling",
    ),
    "rollout/accepted": Entry(
        "samples", "Written to --reject-sampling-output.", "buffer/reject_sampling.py", "--mode reject-sampling"
    ),
}


EVALUATIONS: Table = {
    "eval/<set>/reward": Entry("reward", "Mean reward over all samples of the set.", "buffer/eval_metrics.py"),
    "eval/<set>/reward_ci95": Entry(
        "reward",
        "Half the 95 % interval of this mean: 1.96 standard errors with prompts as clusters.",
        "buffer/eval_metrics.py",
        "more than one prompt",
    ),
    "eval/<set>/accuracy": Entry("share", "Share of samples with a reward of at least 1.", "buffer/eval_metrics.py"),
    "eval/<set>/accuracy_ci95": Entry(
        "share",
        "Half the 95 % interval of this share, in the same way.",
        "buffer/eval_metrics.py",
        "more than one prompt",
    ),
    "eval/<set>/pass@<k>": Entry(
        "share",
        "Chance that at least one of k samples of a prompt is right: the unbiased estimate 1 - C(n-c, k) / C(n, k) "
        "(2107.03374), mean over prompts; k = 1, 2, 4, … up to the samples of a prompt.",
        "buffer/eval_metrics.py",
    ),
    "eval/<set>/num_prompts": Entry("prompts", "Prompts of the set.", "buffer/eval_metrics.py"),
    "eval/<set>/num_samples": Entry("samples", "Samples of the set.", "buffer/eval_metrics.py"),
    "eval/<set>/truncated_ratio": Entry(
        "share", "Share of responses cut off by the length limit.", "buffer/eval_metrics.py"
    ),
    "eval/<set>/response_len": Entry("tokens", "Mean length of the responses.", "buffer/eval_metrics.py"),
    "eval/<set>/response_len_median": Entry("tokens", "Their median.", "buffer/eval_metrics.py"),
    "eval/<set>/response_len_max": Entry("tokens", "The longest.", "buffer/eval_metrics.py"),
    "eval/<set>/loss": Entry(
        "nats",
        "Validation loss: mean of -log p over the tokens that would be trained on.",
        "runtime/trainers.py",
        "--mode sft",
    ),
    "eval/<set>/num_tokens": Entry("tokens", "Number of these tokens.", "runtime/trainers.py", "--mode sft"),
    "eval/weight_version": Entry(
        "version",
        "The version of the weights that sampled all tokens of the evaluation; one that would mix two ends the run.",
        "buffer/evaluation.py",
    ),
    "eval/reward_timeout": Entry(
        "samples", "As rollout/reward_timeout, of all sets.", "rewards/pool.py", "when it happens"
    ),
    "eval/reward_crash": Entry(
        "samples", "As rollout/reward_crash, of all sets.", "rewards/pool.py", "when it happens"
    ),
    "eval/reward_error": Entry(
        "samples", "As rollout/reward_error, of all sets.", "rewards/pool.py", "--reward-failure-value"
    ),
    "eval/failed": Entry(
        "evaluations",
        "1 where the engines of the evaluation died (--eval-num-gpus), and it has no other result.",
        "runtime/background_eval.py",
        "--use-fault-tolerance",
    ),
    "eval/engines_died": Entry(
        "engines", "Engines found dead during the evaluation.", "runtime/engine_pool.py", "--use-fault-tolerance"
    ),
    "eval/answers_refused": Entry(
        "answers", "As rollout/answers_refused.", "rollout/generate_state.py", "when it happens"
    ),
    "eval/requests_retried": Entry(
        "requests", "As rollout/requests_retried.", "rollout/generate_state.py", "--use-fault-tolerance"
    ),
    "eval/tokens_kept": Entry(
        "tokens", "As rollout/tokens_kept.", "rollout/generate_state.py", "--use-fault-tolerance"
    ),
}
