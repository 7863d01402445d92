"""The metrics of a run: the table of `glossary.py`, which says how to add one.

Entries of training stand without prefix: `train/`, `critic/` or `prm/` goes before them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One metric.

    unit     what its number counts
    meaning  a sentence or two, with the formula where there is one
    source   the module that computes it, relative to fusionrl/
    when     flags or a mode that it needs; "" if every run of its kind has it
    """

    unit: str
    meaning: str
    source: str
    when: str = ""


Table = dict[str, Entry]

POLICY: Table = {
    "loss": Entry(
        "loss",
        "The quantity that is optimized, in the aggregation of --loss-aggregation: policy loss + --kl-loss-coef x KL"
        " - --entropy-coef x entropy. In mode sft the mean of -log p. Mean over the optimizer steps.",
        "trainer/loss.py",
    ),
    "pg_loss": Entry(
        "loss", "Its part without KL and entropy, aggregated in the same way.", "trainer/loss.py", "mode rl"
    ),
    "entropy": Entry(
        "nats",
        "Entropy of the policy's next-token distribution at --rollout-temperature, mean over tokens.",
        "trainer/loss.py",
        "mode rl",
    ),
    "kl_loss": Entry(
        "nats",
        "Estimate of KL(policy || reference) by --kl-loss-type, without its coefficient, mean over tokens.",
        "trainer/loss.py",
        "--use-kl-loss",
    ),
    "kl": Entry(
        "nats",
        "Estimate of KL(policy || reference) by --kl-coef-type before the first optimizer step, mean over tokens; "
        "--kl-coef times it is subtracted from the rewards.",
        "trainer/advantages.py",
        "--kl-coef above 0",
    ),
    "kl_excluded": Entry(
        "tokens",
        "Tokens left out of train/kl because a log-prob is -inf or NaN.",
        "trainer/advantages.py",
        "--kl-coef above 0",
    ),
    "opd_kl": Entry(
        "nats",
        "Mean over tokens of log p(policy) - log p(teacher), before the first optimizer step: an estimate of "
        "KL(policy || teacher).",
        "trainer/advantages.py",
        "--use-opd",
    ),
    "opd_excluded": Entry(
        "tokens",
        "Tokens left out of train/opd_kl because a log-prob is -inf or NaN.",
        "trainer/advantages.py",
        "--use-opd",
    ),
    "advantage_mean": Entry("reward", "Mean advantage over tokens.", "trainer/loss.py", "mode rl"),
    "ppo_kl": Entry(
        "nats",
        "Mean over tokens of log p(old) - log p(policy): an estimate (k1) of how far the policy has moved from the "
        "one before the first optimizer step. The first step is left out where there are others: there both are the "
        "same. With a single step it is 0. With --use-rollout-logprobs the old one is the engine's, and all steps "
        "count.",
        "algorithms/policy_losses.py",
        "mode rl",
    ),
    "ppo_kl_max": Entry(
        "nats", "The largest train/ppo_kl of a single optimizer step.", "trainer/step_report.py", "mode rl"
    ),
    "clip_fraction": Entry(
        "share",
        "Share of tokens whose gradient the clip took away; with gspo and gspo_token share of samples (a sample "
        "counts by its share of clipped tokens), as their ratio is one of a whole sample. Steps as of train/ppo_kl.",
        "algorithms/policy_loss.py",
        "policy losses that clip",
    ),
    "clip_fraction_max": Entry(
        "share",
        "The largest train/clip_fraction of a single optimizer step.",
        "trainer/step_report.py",
        "policy losses that clip",
    ),
    "clip_fraction_tokens": Entry(
        "share",
        "Share of tokens in clipped samples: to compare gspo with methods that clip tokens. Steps as of train/ppo_kl.",
        "trainer/loss.py",
        "--policy-loss gspo, gspo_token",
    ),
    "dual_clip_fraction": Entry(
        "share",
        "Share of tokens where the dual clip took the gradient away. Steps as of train/ppo_kl.",
        "algorithms/policy_loss.py",
        "--eps-clip-c",
    ),
    "gate": Entry(
        "0 … 1",
        "Mean over tokens of SAPO's gate 4 s (1 - s), s = sigmoid(tau (ratio - 1)): 1 where the ratio is 1. Steps as"
        " of train/ppo_kl.",
        "algorithms/sapo.py",
        "--policy-loss sapo",
    ),
    "selected_fraction": Entry(
        "share",
        "Share of tokens that the loss chose by their covariance.",
        "algorithms/covariance.py",
        "--policy-loss clip_cov, kl_cov",
    ),
    "old_not_finite": Entry(
        "share",
        "Share of tokens whose old log-prob is -inf or NaN; they have loss 0.",
        "algorithms/policy_losses.py",
        "mode rl",
    ),
    "opsm_fraction": Entry(
        "share",
        "Share of tokens masked because their advantage is negative and their sample too far from the policy.",
        "algorithms/corrections.py",
        "--use-opsm",
    ),
    "is_ratio": Entry(
        "ratio",
        "Mean over tokens of the importance ratio trainer / engine (of a token or its sample, --tis-level), before "
        "clipping.",
        "algorithms/corrections.py",
        "--use-tis, --rejection-level or --tis-veto",
    ),
    "is_abs": Entry(
        "ratio",
        "Mean over tokens of |importance ratio - 1|.",
        "algorithms/corrections.py",
        "--use-tis, --rejection-level or --tis-veto",
    ),
    "is_clip_fraction": Entry(
        "share",
        "Share of tokens whose importance ratio is outside --tis-clip-low … --tis-clip.",
        "algorithms/corrections.py",
        "--use-tis, --rejection-level or --tis-veto",
    ),
    "is_rejected": Entry(
        "share",
        "Share of tokens in samples that --rejection-level drops.",
        "algorithms/corrections.py",
        "--use-tis, --rejection-level or --tis-veto",
    ),
    "is_vetoed": Entry(
        "share",
        "Share of tokens in samples that --tis-veto drops.",
        "algorithms/corrections.py",
        "--use-tis, --rejection-level or --tis-veto",
    ),
    "is_dropped": Entry(
        "share",
        "Share of tokens that the correction drops for any reason.",
        "algorithms/corrections.py",
        "--use-tis, --rejection-level or --tis-veto",
    ),
    "is_not_finite": Entry(
        "share",
        "Share of tokens without an importance ratio.",
        "algorithms/corrections.py",
        "--use-tis, --rejection-level or --tis-veto",
    ),
    "dpo_loss": Entry(
        "nats", "DPO's loss before each optimizer step, mean over pairs.", "algorithms/dpo.py", "--policy-loss dpo"
    ),
    "reward_margin": Entry(
        "nats",
        "Mean over pairs of the implicit reward of the chosen answer minus that of the rejected; an implicit reward "
        "is --dpo-beta x (log p(policy) - log p(reference)).",
        "algorithms/dpo.py",
        "--policy-loss dpo",
    ),
    "reward_accuracy": Entry(
        "share", "Share of pairs with a margin above 0.", "algorithms/dpo.py", "--policy-loss dpo"
    ),
    "chosen_reward": Entry(
        "nats", "Mean implicit reward of the chosen answers.", "algorithms/dpo.py", "--policy-loss dpo"
    ),
    "rejected_reward": Entry(
        "nats", "Mean implicit reward of the rejected answers.", "algorithms/dpo.py", "--policy-loss dpo"
    ),
    "num_pairs": Entry("pairs", "Pairs that were trained on.", "algorithms/dpo.py", "--policy-loss dpo"),
    "pairs_excluded": Entry(
        "pairs",
        "Pairs left out: an answer has no trained token, or a log-prob that is -inf or NaN.",
        "algorithms/dpo.py",
        "--policy-loss dpo",
    ),
}

ENGINE_AGAINST_TRAINER: Table = {
    "logprob_diff_mean": Entry(
        "nats",
        "Mean of |log p(trainer) - log p(engine)| over the trained tokens that the current weights sampled. As the"
        " other metrics of this table, it leaves out tokens of older weights (--partial-rollout).",
        "algorithms/mismatch.py",
        "mode rl, where the engines' log-probs are known",
    ),
    "logprob_diff_max": Entry(
        "nats",
        "The largest of these differences.",
        "algorithms/mismatch.py",
        "mode rl, where the engines' log-probs are known",
    ),
    "logprob_diff_signed": Entry(
        "nats",
        "Mean of log p(trainer) - log p(engine).",
        "algorithms/mismatch.py",
        "mode rl, where the engines' log-probs are known",
    ),
    "logprob_diff_over": Entry(
        "share",
        "Share of tokens that differ by more than 0.5 nats.",
        "algorithms/mismatch.py",
        "mode rl, where the engines' log-probs are known",
    ),
    "logprob_k3": Entry(
        "nats",
        "Estimate (k3) of KL(engine || trainer), mean over tokens.",
        "algorithms/mismatch.py",
        "mode rl, where the engines' log-probs are known",
    ),
    "logprob_ess": Entry(
        "0 … 1",
        "Effective sample size (sum w)^2 / (n sum w^2) of the ratios w = p(trainer) / p(engine).",
        "algorithms/mismatch.py",
        "mode rl, where the engines' log-probs are known",
    ),
    "logprob_ratio_mean": Entry(
        "ratio",
        "Mean of the ratios w: 1 where the tokens were drawn from the distribution that the engine's log-probs are of.",
        "algorithms/mismatch.py",
        "mode rl, where the engines' log-probs are known",
    ),
    "logprob_not_sampled": Entry(
        "share",
        "Share of the trained tokens with an engine log-prob of exactly 0 that the trainer finds unlikely: no engine"
        " sampled them.",
        "algorithms/mismatch.py",
        "mode rl, where the engines' log-probs are known",
    ),
    "logprob_ratio_error": Entry(
        "ratio",
        "Standard error of that mean, over the tokens of all steps together.",
        "algorithms/mismatch.py",
        "mode rl, where the engines' log-probs are known",
    ),
    "logprob_not_finite": Entry(
        "share",
        "Share of tokens with a log-prob of -inf or NaN; the other metrics leave them out.",
        "algorithms/mismatch.py",
        "mode rl, where the engines' log-probs are known",
    ),
}

EVERY_MODEL: Table = {
    "lr": Entry("", "Learning rate, mean over the optimizer steps.", "trainer/step.py"),
    "grad_norm": Entry(
        "norm", "L2 norm of the whole gradient before --clip-grad, mean over the optimizer steps.", "trainer/step.py"
    ),
    "grad_norm_min": Entry("norm", "The smallest grad_norm of a single optimizer step.", "trainer/step_report.py"),
    "grad_norm_max": Entry("norm", "The largest of a single optimizer step.", "trainer/step_report.py"),
    "skipped": Entry(
        "steps", "Optimizer steps that were skipped because a loss or a gradient was not finite.", "trainer/step.py"
    ),
    "num_tokens": Entry("tokens", "Tokens that were trained on, all steps together.", "trainer/steps.py"),
    "num_samples": Entry(
        "samples",
        "Samples of the optimizer steps: what the loss divides by with --loss-aggregation sequence_mean and "
        "constant. Samples without a trained token count.",
        "trainer/steps.py",
    ),
    "masked_samples": Entry(
        "samples",
        "Of these, samples without a trained token: removed by a filter, failed, or masked throughout.",
        "trainer/steps.py",
    ),
}

CRITIC: Table = {
    "loss": Entry(
        "loss",
        "Half the squared error of the values (clipped with --value-clip), in the aggregation of --loss-aggregation."
        " Mean over the optimizer steps.",
        "trainer/loss.py",
    ),
    "value_error": Entry(
        "reward", "Mean over tokens of |value before the first optimizer step - return|.", "trainer/loss.py"
    ),
    "value_mean": Entry("reward", "Mean value over tokens.", "trainer/loss.py"),
    "return_mean": Entry("reward", "Mean return over tokens: what the values are trained towards.", "trainer/loss.py"),
    "value_clip_fraction": Entry(
        "share",
        "Share of tokens where --value-clip took the gradient away. Steps as of train/ppo_kl.",
        "algorithms/value_loss.py",
    ),
    "value_clip_fraction_max": Entry("share", "The largest of a single optimizer step.", "trainer/step_report.py"),
}

REWARD_MODEL: Table = {
    "loss": Entry(
        "loss",
        "Cross entropy of the outcome, summed over samples with a trained token and divided by all samples. Mean "
        "over the optimizer steps.",
        "trainer/loss.py",
    ),
    "accuracy": Entry(
        "share",
        "Share of samples with a trained token whose outcome the sign of the implicit reward predicts.",
        "trainer/loss.py",
    ),
    "implicit_reward": Entry(
        "nats",
        "Mean over these samples of --prm-beta x (log p(model) - log p(its start)), summed over the tokens.",
        "trainer/loss.py",
    ),
    "outcome": Entry("share", "Share of these samples with a raw reward above 0.", "trainer/loss.py"),
    "excluded": Entry("tokens", "Tokens left out because a log-prob is -inf or NaN.", "trainer/loss.py"),
}

ROLLOUTS: Table = {
    "rollout/raw_reward": Entry(
        "reward",
        "Mean reward as the reward function gave it, before penalties and normalization; 0 for a failed sample.",
        "buffer/report.py",
    ),
    "rollout/raw_reward_std": Entry(
        "reward", "Standard deviation of these rewards over the samples.", "buffer/report.py"
    ),
    "rollout/accuracy": Entry("share", "Share of samples with a raw reward of at least 1.", "buffer/report.py"),
    "rollout/zero_std_groups": Entry(
        "share",
        "Share of groups whose raw rewards are all equal: of them nothing is learnt by estimators that compare "
        "within a group. Samples without a reward do not count.",
        "buffer/report.py",
    ),
    "rollout/response_len/mean": Entry(
        "tokens", "Mean length of the responses, tools' tokens included.", "buffer/report.py"
    ),
    "rollout/response_len/max": Entry("tokens", "The longest response.", "buffer/report.py"),
    "rollout/truncated_ratio": Entry(
        "share", "Share of responses that were cut off by the length limit.", "buffer/report.py"
    ),
    "rollout/failed": Entry(
        "samples", "Samples that failed or were aborted; they are not trained on.", "buffer/report.py"
    ),
    "rollout/num_samples": Entry("samples", "Samples of the rollout.", "buffer/report.py"),
    "rollout/num_tokens": Entry(
        "tokens", "Response tokens of the rollout, tools' tokens included.", "buffer/report.py"
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
    "rollout/code_failed/<reason>": Entry(
        "samples",
        "Samples with a program that failed for this reason (docs/rewards.md).",
        "buffer/report.py",
        "--rm-type code, when it happens",
    ),
    "rollout/reward_<part>": Entry(
        "reward",
        "Mean of one part of a weighted sum of rewards, before its weight.",
        "buffer/report.py",
        "several rewards in --rm-type",
    ),
    "rollout/<set>/raw_reward": Entry(
        "reward", "As rollout/raw_reward, of one set.", "buffer/report.py", "several --prompt-data"
    ),
    "rollout/<set>/accuracy": Entry(
        "share", "As rollout/accuracy, of one set.", "buffer/report.py", "several --prompt-data"
    ),
    "rollout/<set>/num_samples": Entry("samples", "Samples of one set.", "buffer/report.py", "several --prompt-data"),
    "rollout/opd_reverse_kl": Entry(
        "nats",
        "Mean over trained tokens of log p(engine) - log p(teacher): an estimate of KL(policy || teacher).",
        "buffer/tokens.py",
        "samples with teacher_log_probs",
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
        "buffer/tokens.py",
        "known weight versions",
    ),
    "rollout/staleness/token_max": Entry(
        "pushes", "Staleness of the oldest trained token.", "buffer/tokens.py", "known weight versions"
    ),
    "rollout/staleness/sample_mean": Entry(
        "pushes",
        "Mean over the samples; a sample is as stale as its oldest trained token.",
        "buffer/tokens.py",
        "known weight versions",
    ),
    "rollout/staleness/sample_max": Entry(
        "pushes", "As rollout/staleness/token_max.", "buffer/tokens.py", "known weight versions"
    ),
    "rollout/staleness/tokens/<k>": Entry(
        "share",
        "Share of trained tokens with staleness k; 8 also counts what is older.",
        "buffer/tokens.py",
        "known weight versions, where there are such tokens; k = 0 always",
    ),
    "rollout/staleness/samples/<k>": Entry(
        "share",
        "Share of samples with staleness k; 8 also counts what is older.",
        "buffer/tokens.py",
        "known weight versions, where there are such samples; k = 0 always",
    ),
    "rollout/staleness/unknown": Entry(
        "share",
        "Share of trained tokens whose weight version is not known; the metrics above leave them out.",
        "buffer/tokens.py",
        "when it happens",
    ),
    "rollout/partial_samples": Entry(
        "samples",
        "Unfinished samples that the next rollout continues.",
        "rollout/sglang_rollout.py",
        "--partial-rollout",
    ),
    "rollout/engines_died": Entry(
        "engines", "Engines found dead during the rollout.", "cluster/engine_pool.py", "--use-fault-tolerance"
    ),
    "rollout/answers_refused": Entry(
        "answers",
        "Answers of engines that were no answer to their request (docs/security.md); each was asked for once more.",
        "rollout/client.py",
        "when it happens",
    ),
    "rollout/requests_retried": Entry(
        "requests",
        "Requests that were sent again, by the client and the router.",
        "rollout/client.py",
        "--use-fault-tolerance",
    ),
    "rollout/tokens_kept": Entry(
        "tokens",
        "Tokens of engines that died which another engine continued.",
        "rollout/client.py",
        "--use-fault-tolerance",
    ),
    "rollout/considered": Entry("samples", "Samples of the rollout.", "buffer/accepted.py", "--mode reject-sampling"),
    "rollout/unfinished": Entry(
        "samples", "Not accepted: truncated, aborted or failed.", "buffer/accepted.py", "--mode reject-sampling"
    ),
    "rollout/below_threshold": Entry(
        "samples",
        "Not accepted: reward below --reject-sampling-threshold.",
        "buffer/accepted.py",
        "--mode reject-sampling",
    ),
    "rollout/duplicates": Entry(
        "samples",
        "Not accepted: the same answer to the same prompt is in the file.",
        "buffer/accepted.py",
        "--mode reject-sampling",
    ),
    "rollout/surplus": Entry(
        "samples",
        "Not accepted: the prompt has --reject-sampling-per-prompt better ones.",
        "buffer/accepted.py",
        "--mode reject-sampling",
    ),
    "rollout/accepted": Entry(
        "samples", "Written to --reject-sampling-output.", "buffer/accepted.py", "--mode reject-sampling"
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
        "cluster/trainers.py",
        "--mode sft",
    ),
    "eval/<set>/num_tokens": Entry("tokens", "Number of these tokens.", "cluster/trainers.py", "--mode sft"),
    "eval/reward_timeout": Entry(
        "samples", "As rollout/reward_timeout, of all sets.", "rewards/pool.py", "when it happens"
    ),
    "eval/reward_crash": Entry(
        "samples", "As rollout/reward_crash, of all sets.", "rewards/pool.py", "when it happens"
    ),
    "eval/engines_died": Entry(
        "engines", "Engines found dead during the evaluation.", "cluster/engine_pool.py", "--use-fault-tolerance"
    ),
    "eval/answers_refused": Entry("answers", "As rollout/answers_refused.", "rollout/client.py", "when it happens"),
    "eval/requests_retried": Entry(
        "requests", "As rollout/requests_retried.", "rollout/client.py", "--use-fault-tolerance"
    ),
    "eval/tokens_kept": Entry("tokens", "As rollout/tokens_kept.", "rollout/client.py", "--use-fault-tolerance"),
}

TIMES: Table = {
    "perf/step_time_s": Entry(
        "seconds",
        "The whole step: rollout, training, weight push. Evaluations and checkpoints are not in it.",
        "driver/step.py",
    ),
    "perf/time_generate_s": Entry(
        "seconds", "The rollout: generation, rewards, filters, and cutting it into shards.", "buffer/actor.py"
    ),
    "perf/time_train_s": Entry(
        "seconds",
        "Training: all forward passes and optimizer steps, critic and reward model included.",
        "driver/context.py",
    ),
    "perf/time_sync_s": Entry("seconds", "The weight push, without its verification.", "sync/push.py"),
    "perf/time_eval_s": Entry("seconds", "An evaluation of all sets.", "buffer/actor.py"),
    "perf/tokens_per_s": Entry(
        "tokens/s",
        "Response tokens of the rollout divided by perf/step_time_s; in mode sft trained tokens.",
        "driver/step.py",
    ),
    "perf/update_weights_density": Entry(
        "share",
        "Share of the weights' elements that travelled; 1 for a full version.",
        "sync/disk_push.py",
        "--update-weight-transport disk",
    ),
    "perf/update_weights_wire_bytes": Entry(
        "bytes", "Size of the version's files.", "sync/disk_push.py", "--update-weight-transport disk"
    ),
}

PUSHES: Table = {
    "sync/version": Entry(
        "version", "Version of the weights that the engines have after the push: equal to `step`.", "sync/push.py"
    ),
    "sync/prepare_s": Entry("seconds", "Preparation, while the engines generate.", "sync/push.py"),
    "sync/pause_s": Entry("seconds", "How long the engines were paused.", "sync/push.py"),
    "sync/transfer_s": Entry(
        "seconds",
        "From the first byte sent to the last one loaded, within the pause.",
        "sync/push.py",
        "not by disk",
    ),
    "sync/bytes": Entry("bytes", "Bytes of the weights, each counted once.", "sync/push.py"),
    "sync/buckets": Entry("buckets", "Parts in which they were sent; by disk, files.", "sync/push.py"),
    "sync/calls": Entry("calls", "Calls of engines.", "sync/push.py", "not by disk"),
    "sync/gb_per_s": Entry(
        "10^9 bytes/s", "What all engines together received in a second of the transfer.", "sync/push.py"
    ),
    "sync/full_hosts": Entry(
        "hosts",
        "Hosts that got the full version in place of a delta.",
        "sync/disk_push.py",
        "--update-weight-transport disk",
    ),
    "sync/engines_restarted": Entry(
        "engines", "Engines replaced since the run began.", "cluster/weight_sync.py", "--use-fault-tolerance"
    ),
    "sync/verify_logprob_diff": Entry(
        "nats",
        "Mean |log p(trainer) - log p(engine)| of a few tokens after the push, of the worst engine.",
        "sync/verify.py",
        "--verify-weights",
    ),
    "sync/verify_logprob_diff_max": Entry(
        "nats", "The largest of these differences.", "sync/verify.py", "--verify-weights"
    ),
    "sync/verify_tensors": Entry(
        "tensors",
        "Tensors of the engines whose checksums equal the trainers'.",
        "sync/verify.py",
        "--verify-weights",
    ),
}
