"""Checks of the flags of reward models (--rm-*, --prm-*) and of a teacher (--opd-*), and of the folders they name."""

from __future__ import annotations

from collections.abc import Mapping

from fusionrl.checks.model import size_errors
from fusionrl.config import upstream_flags as upstream
from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of, has_own_rollout
from fusionrl.models.scorers import REWARD_MODELS, ScorerModel, has_chat_template, read_scorer, same_tokens
from fusionrl.models.shape import ModelShape, read_model_shape
from fusionrl.models.weight_files import check_weight_files, is_megatron_folder


def scorer_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """Every mistake, as messages that name flag, value and cure. `shape`: the policy's, where it could be read."""
    errors: list[str] = []
    if config.reward.rm_model is not None:
        errors += _reward_model_errors(config, config.reward.rm_model)
    if config.algorithm.use_opd:
        errors += _teacher_errors(config, shape)
    if estimator_of(config.algorithm).role == "prm" and config.prm.prm_load is not None:
        errors += _process_model_errors(config, config.prm.prm_load, shape)
    return errors


def _reward_model_errors(config: Config, folder: str) -> list[str]:
    where, reward = f"--rm-model {folder}", config.reward
    try:
        model = read_scorer(folder, "--rm-model")
        check_weight_files(folder, "--rm-model")
    except ValueError as error:
        return [str(error)]
    errors = _engine_errors("--rm", reward.rm_num_gpus_per_engine, reward.rm_server_args, model, config)
    if model.architecture not in REWARD_MODELS:
        errors.append(f"{where}: it is a {model.architecture}; a reward model is one of {', '.join(REWARD_MODELS)}")
    elif model.num_labels != 1:
        errors.append(f"{where}: it has {model.num_labels} labels; a reward model has one (num_labels, id2label)")
    if config.model.hf_checkpoint is None:
        return errors
    same = same_tokens(config.model.hf_checkpoint, folder)
    if reward.rm_input == "tokens" and not same:
        errors.append(
            f"--rm-input tokens: the tokenizers of --hf-checkpoint {config.model.hf_checkpoint} and {where} differ;"
            " use chat or auto"
        )
    if reward.rm_input == "chat" or (reward.rm_input == "auto" and not same):
        if has_chat_template(folder) is False:
            errors.append(f"{where}: its tokenizer has no chat template to write the conversation by")
    else:
        errors += _length_errors(config, model, where)
    return errors


def _process_model_errors(config: Config, folder: str, shape: ModelShape | None) -> list[str]:
    """Return the errors of PRIME's reward model: the trainers read it, and it sees the policy's own tokens."""
    where = f"--prm-load {folder}"
    try:
        model_shape = read_model_shape(folder, "--prm-load")
        check_weight_files(folder, "--prm-load")
        errors = _length_errors(config, read_scorer(folder, "--prm-load"), where)
    except ValueError as error:
        return [str(error)]
    return errors + _token_errors(config, shape, where, folder, model_shape.vocab_size)


def _token_errors(config: Config, shape: ModelShape | None, where: str, folder: str, vocab_size: int) -> list[str]:
    """Return the error of a model that reads the policy's own tokens and has others."""
    policy = config.model.hf_checkpoint
    if shape is not None and vocab_size != shape.vocab_size:
        differs = f"its vocabulary has {vocab_size} tokens, that of --hf-checkpoint {policy} has {shape.vocab_size}"
    elif policy is not None and not same_tokens(policy, folder):
        differs = f"its tokenizer has other tokens than that of --hf-checkpoint {policy}"
    else:
        return []
    return [f"{where}: {differs}; it reads the policy's own tokens, so they must agree"]


def _teacher_errors(config: Config, shape: ModelShape | None) -> list[str]:
    options, run = config.algorithm, config.run
    errors = [f"--use-opd belongs to --mode rl, not to {run.mode}"] if run.mode != "rl" else []
    of_engine = options.opd_type == "sglang"
    if options.opd_teacher_load is None:
        return [*errors, *_outside_teacher_errors(config)]
    where = f"--opd-teacher-load {options.opd_teacher_load}"
    if config.rollout.rollout_temperature != 1 and of_engine:
        errors.append(
            f"--use-opd with --rollout-temperature {config.rollout.rollout_temperature}: engines say the log-probs of"
            " tokens that they read at temperature 1; leave it at 1, or use --opd-type megatron"
        )
    if config.eval.eval_prompt_data and not (config.reward.rm_type or config.reward.custom_rm_path):
        errors.append(
            "--eval-prompt-data: an evaluation needs a reward, --rm-type or --custom-rm-path; with --eval-config the"
            " sets have rewards of their own, and --use-opd may train without one"
        )
    if not of_engine and is_megatron_folder(options.opd_teacher_load):
        return errors  # its shape is compared when the trainers read it
    try:
        model = read_scorer(options.opd_teacher_load, "--opd-teacher-load")
        check_weight_files(options.opd_teacher_load, "--opd-teacher-load")
    except ValueError as error:
        return [*errors, str(error)]
    if of_engine:
        errors += _engine_errors(
            "--opd-teacher", options.opd_teacher_num_gpus_per_engine, options.opd_teacher_server_args, model, config
        )
        errors += _length_errors(config, model, where)
    elif shape is not None:
        errors += _megatron_teacher_errors(options.opd_teacher_load, shape, config)
    return errors + _token_errors(config, shape, where, options.opd_teacher_load, model.vocab_size)


def _outside_teacher_errors(config: Config) -> list[str]:
    """Without a teacher of the run's own, a user's function has to give `teacher_log_probs`."""
    algorithm, rollout, reward = config.algorithm, config.rollout, config.reward
    custom_paths = (
        reward.custom_reward_post_process_path,
        reward.custom_rm_path,
        rollout.custom_generate_function_path,
    )
    has_own = any(custom_paths) or has_own_rollout(config)
    if algorithm.opd_type == "sglang" and has_own:
        return []
    return [
        "--use-opd needs --opd-teacher-load: the Hugging Face folder of the teacher; or, without --opd-type megatron, a"
        " function of yours that sets the teacher_log_probs of the samples (--custom-reward-post-process-path)"
    ]


def _megatron_teacher_errors(folder: str, shape: ModelShape, config: Config) -> list[str]:
    """Return the errors of a teacher that the trainers compute: it replaces their weights for a while."""
    try:
        model_shape = read_model_shape(folder, "--opd-teacher-load")
    except ValueError as error:
        return [str(error)]
    if model_shape == shape:
        return []
    return [
        f"--opd-teacher-load {folder}: its config.json describes another shape than that of --hf-checkpoint"
        f" {config.model.hf_checkpoint}, with which --opd-type megatron computes; use --opd-type sglang"
    ]


def _engine_errors(
    prefix: str, size: int, server_args: Mapping[str, object], model: ScorerModel, config: Config
) -> list[str]:
    per_node = config.cluster.num_gpus_per_node
    errors = size_errors(f"{prefix}-num-gpus-per-engine", size, model.num_attention_heads, per_node)
    for name, value in server_args.items():
        option = "--" + name.replace("_", "-")
        values = (
            [] if isinstance(value, bool) else [str(item) for item in (value if isinstance(value, list) else [value])]
        )
        try:
            upstream.parse_with(upstream.sglang_parser(), option, values, upstream.SGLANG_OWNED)
        except upstream.UpstreamError as error:
            errors.append(f"{prefix}-server-args {name}: {error}")
    return errors


def _length_errors(config: Config, model: ScorerModel, where: str) -> list[str]:
    longest = config.rollout.rollout_max_context_len
    if longest is None or model.max_positions is None or longest <= model.max_positions:
        return []
    return [f"--rollout-max-context-len {longest} is over the {model.max_positions} positions of {where}"]
