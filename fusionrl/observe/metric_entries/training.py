"""Entries of training; `train/`, `critic/` or `prm/` goes before their names."""

from __future__ import annotations

from fusionrl.observe.metric_entries.entry import Entry, Table

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
    "advantage_abs_max": Entry(
        "reward",
        "The largest |advantage| of a token, over all optimizer steps of the rollout; infinite where one is NaN.",
        "trainer/loss.py",
        "mode rl",
    ),
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
        "Attempts of the optimizer steps: what the loss divides by with --loss-aggregation sequence_mean and "
        "constant. Attempts without a trained token count; several samples that share a rollout_id are one.",
        "trainer/steps.py",
    ),
    "masked_samples": Entry(
        "samples",
        "Of these, attempts without a trained token: removed by a filter, failed, or masked throughout.",
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
