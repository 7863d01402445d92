"""Checks of what a mode needs, and of what does not go together with it."""

from __future__ import annotations

from fusionrl.checks.eval_engines import eval_engine_errors
from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of
from fusionrl.data.rows import FORMATS
from fusionrl.plan.pipeline_knobs import stream_errors


def missing_flags(config: Config) -> list[str]:
    """List flags that a run cannot do without; a plan for a cluster elsewhere can."""
    errors: list[str] = []
    run, mode = config.run, config.run.mode
    if mode != "eval":
        has_source = config.data.data_source_path != type(config.data)().data_source_path
        if config.data.prompt_data is None and not has_source and run.load_debug_rollout_data is None:
            errors.append(f"--prompt-data is required in --mode {mode}: {FORMATS}")
        if config.rollout.rollout_batch_size is None:
            errors.append(f"--rollout-batch-size is required in --mode {mode}: prompts of one step")
        if run.num_rollout is None and run.num_epoch is None:
            errors.append(f"--num-rollout or --num-epoch is required in --mode {mode}")
    own_rewards = mode == "eval" and config.eval.eval_config is not None  # each set is asked for its own
    needs_reward = mode in ("rl", "reject-sampling", "eval") and not run.debug_train_only and not own_rewards
    custom_rollout = config.rollout.rollout_function_path != type(config.rollout)().rollout_function_path
    algorithm = config.algorithm
    may_lack = algorithm.use_opd and estimator_of(algorithm).role != "prm"
    rollout = config.rollout  # a function or an agent may give the reward; one that does not gets an error
    has_own = custom_rollout or rollout.custom_generate_function_path is not None or rollout.agent_path is not None
    needs_reward = needs_reward and not has_own and not may_lack
    if needs_reward and config.reward.rm_type is None and config.reward.custom_rm_path is None:
        errors.append(f"a reward is required in --mode {mode}: --rm-type or --custom-rm-path")
    no_limit = config.rollout.rollout_max_response_len is None and not own_rewards
    if mode != "sft" and not run.debug_train_only and no_limit:
        errors.append(f"--rollout-max-response-len is required in --mode {mode}")
    if mode == "eval" and not config.eval.has_sets:
        errors.append("--eval-prompt-data is required in --mode eval: pairs of name and file (or --eval-config)")
    return errors


def mode_errors(config: Config) -> list[str]:
    """List flags that do not go together with the mode, or with one another."""
    errors: list[str] = []
    run, mode = config.run, config.run.mode
    errors += stream_errors(config) + eval_engine_errors(config)
    if config.eval.eval_interval and not config.eval.has_sets:
        errors.append(f"--eval-interval {config.eval.eval_interval} needs --eval-prompt-data or --eval-config")
    if run.debug_train_only and run.debug_rollout_only:
        errors.append("--debug-train-only and --debug-rollout-only exclude each other")
    elif mode == "eval" and (run.debug_train_only or run.debug_rollout_only):
        flag = "--debug-train-only" if run.debug_train_only else "--debug-rollout-only"
        errors.append(f"{flag}: --mode eval runs the engines alone, on its sets; leave it out")
    if run.debug_train_only and mode == "rl" and run.load_debug_rollout_data is None:
        errors.append("--debug-train-only in --mode rl needs --load-debug-rollout-data")
    if run.load_debug_rollout_data is not None and not run.debug_train_only:
        errors.append("--load-debug-rollout-data needs --debug-train-only")
    if config.reject_sampling.no_trainer and mode != "reject-sampling":
        errors.append(f"--no-trainer belongs to --mode reject-sampling, not to {mode}")
    if config.model.megatron_checkpoint is not None and (mode == "eval" or config.reject_sampling.no_trainer):
        errors.append(
            "--megatron-checkpoint: the engines read Hugging Face folders, and there are no trainers to push its"
            " weights; convert it with tools/convert.py to-hf"
        )
    if mode == "eval" and config.checkpoint.save_hf:
        errors.append("--save-hf: --mode eval changes no weights")
    return errors
