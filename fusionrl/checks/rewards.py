"""Checks of rewards, of the sandbox, and of reward models and teachers."""

import re
from collections.abc import Mapping

from fusionrl.checks.model import size_errors
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import EvalSet, readable_sets, sees_images
from fusionrl.config.run_parts import estimator_of, evaluates_by_default, has_own_rollout
from fusionrl.models.engine_config import REWARD_MODELS, ScorerModel, has_chat_template, read_scorer, same_tokens
from fusionrl.models.hf_folder import check_weight_files, is_megatron_folder
from fusionrl.models.shape import ModelShape, read_model_shape
from fusionrl.rewards.registry import REMOTE, rm_type_errors, runs_programs


def reward_errors(config: Config) -> list[str]:
    """List what is wrong with the other flags of a run's reward, and with what is taken off for length."""
    errors: list[str] = []
    run, rollout, reward, algorithm = config.run, config.rollout, config.reward, config.algorithm
    longest, own_rewards = rollout.rollout_max_response_len, run.mode == "eval" and config.eval.eval_config is not None
    sources = (  # of a reward; a function or an agent that gives none gets an error
        *(reward.rm_type, reward.custom_rm_path, has_own_rollout(config)),
        *(rollout.custom_generate_function_path, rollout.agent_path),
        algorithm.use_opd and estimator_of(algorithm).role != "prm",
    )
    if run.mode != "sft" and not run.debug_train_only and not own_rewards and not any(sources):
        errors.append(f"a reward is required in --mode {run.mode}: --rm-type or --custom-rm-path")
    url = reward.rm_url
    is_custom = reward.custom_rm_path is not None  # it may read the address from its args
    if (reward.rm_type == REMOTE) != (url is not None) and not (is_custom and url is not None):
        errors.append(f"--rm-type {REMOTE} and --rm-url go together; give both")
    if url is not None and not re.match(r"https?://[^/]+", url):
        errors.append(f"--rm-url {url}: an address begins with http:// or https://")
    if reward.rm_format_regex is not None:
        try:
            re.compile(reward.rm_format_regex)
        except re.error as error:
            errors.append(f"--rm-format-regex {reward.rm_format_regex}: no regular expression: {error}")
    for flag, value in (
        ("--overlong-buffer-len", reward.overlong_buffer_len),
        ("--length-penalty-coef", reward.length_penalty_coef),
    ):
        if value and longest is None:
            errors.append(f"{flag} {value} needs --rollout-max-response-len")
        if value and reward.custom_reward_post_process_path is not None:
            errors.append(f"{flag} {value} and --custom-reward-post-process-path exclude each other; leave one out")
    if reward.overlong_buffer_len and longest is not None and reward.overlong_buffer_len > longest:
        flag = f"--overlong-buffer-len {reward.overlong_buffer_len}"
        errors.append(f"{flag} is longer than --rollout-max-response-len {longest}; lower it")
    return errors


def source_errors(config: Config) -> list[str]:
    """List flags that exclude each other: a reward is either built in or the user's."""
    both = config.reward.rm_type and config.reward.custom_rm_path
    return ["--rm-type and --custom-rm-path exclude each other; leave one out"] if both else []


def set_reward_errors(config: Config, eval_set: EvalSet) -> list[str]:
    """List what is wrong with the reward of a set of --eval-config; that of the flags is checked once."""
    rm_type, has_own = eval_set.rm_type, eval_set.custom_generate_function_path is not None  # it may set the reward
    if rm_type is None and eval_set.custom_rm_path is None and not has_own and evaluates_by_default(config):
        return ["it has no reward; give rm_type or custom_rm_path"]
    if rm_type == config.reward.rm_type:
        return []
    return rm_type_errors("rm_type", rm_type, config.reward.rm_model, eval_set.reward_key, "reward_key")


AGENT = "fusionrl.rollout.agent.generate"


def uses_sandbox(config: Config) -> str | None:
    """The flag by which programs of the model are run; None: no flag says so (rows of the data may, and hooks)."""
    if config.reward.custom_rm_path is None and runs_programs(config.reward.rm_type):
        return f"--rm-type {config.reward.rm_type}"
    path = config.rollout.custom_generate_function_path
    if path is not None and path.replace(":", ".") == AGENT and config.rollout.tools_path is None:
        return f"--custom-generate-function-path {path} without --tools-path"
    for eval_set in readable_sets(config):
        if eval_set.custom_rm_path is None and runs_programs(eval_set.rm_type):
            return f"evaluation set {eval_set.name}, --rm-type {eval_set.rm_type}"
    return None


def sandbox_of_run(config: Config) -> str | None:
    """Run one program in the sandbox, if the run will run any; return the mode in words. ValueError: it fails."""
    flag = uses_sandbox(config)
    if flag is None:
        return None
    from fusionrl import sandbox

    sandbox.allow_weak(config.reward.allow_weak_sandbox)
    try:
        return sandbox.probe()
    except sandbox.SandboxError as error:
        raise ValueError(f"{flag}: {error}") from error


def scorer_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """Every mistake, as messages that name flag, value and cure. `shape`: the policy's, where it could be read."""
    errors: list[str] = []
    if config.reward.rm_model is not None:
        errors += _reward_model_errors(config, config.reward.rm_model)
    if config.algorithm.use_opd:
        errors += _teacher_errors(config, shape)
    if estimator_of(config.algorithm).role == "prm" and (folder := config.prm.prm_load) is not None:
        try:  # the trainers read PRIME's reward model, and it sees the policy's own tokens
            vocab_size = read_model_shape(folder, "--prm-load").vocab_size
            check_weight_files(folder, "--prm-load")
            errors += _token_errors(config, shape, f"--prm-load {folder}", folder, vocab_size)
        except ValueError as error:
            errors.append(str(error))
    return errors


def _reward_model_errors(config: Config, folder: str) -> list[str]:
    where, reward, policy = f"--rm-model {folder}", config.reward, config.model.hf_checkpoint
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
    is_same = policy is not None and same_tokens(policy, folder)
    if policy is not None and reward.rm_input == "tokens" and not is_same:
        tokenizers = f"the tokenizers of --hf-checkpoint {policy} and {where}"
        errors.append(f"--rm-input tokens: {tokenizers} differ; use chat or auto")
    reads_chat = reward.rm_input == "chat" or (reward.rm_input == "auto" and not is_same)
    if policy is not None and reads_chat and has_chat_template(folder) is False:
        errors.append(f"{where}: its tokenizer has no chat template to write the conversation by")
    return errors


def _token_errors(config: Config, shape: ModelShape | None, where: str, folder: str, vocab_size: int) -> list[str]:
    policy = config.model.hf_checkpoint
    if shape is not None and vocab_size != shape.vocab_size:
        differs = f"its vocabulary has {vocab_size} tokens, that of --hf-checkpoint {policy} has {shape.vocab_size}"
    elif policy is not None and not same_tokens(policy, folder):
        differs = f"its tokenizer has other tokens than that of --hf-checkpoint {policy}"
    else:
        return []
    return [f"{where}: {differs}; it reads the policy's own tokens, so they must agree"]


def _teacher_errors(config: Config, shape: ModelShape | None) -> list[str]:
    options, temperature, errors = config.algorithm, config.rollout.rollout_temperature, []
    of_engine, folder = options.opd_type == "sglang", options.opd_teacher_load
    if folder is None:
        reward = config.reward
        own = (reward.custom_reward_post_process_path, reward.custom_rm_path, has_own_rollout(config))
        if of_engine and (any(own) or config.rollout.custom_generate_function_path):
            return []
        function = "a function that sets teacher_log_probs (--custom-reward-post-process-path)"
        return [f"--use-opd needs --opd-teacher-load; or, without --opd-type megatron, {function}"]
    if temperature != 1 and of_engine:
        cure = "leave it at 1, or use --opd-type megatron"
        errors.append(f"--use-opd with --rollout-temperature {temperature}: engines score at temperature 1; {cure}")
    if config.eval.eval_prompt_data and not (config.reward.rm_type or config.reward.custom_rm_path):
        cure = "give --rm-type or --custom-rm-path, or --eval-config with rewards of the sets"
        errors.append(f"--eval-prompt-data: an evaluation needs a reward; {cure}")
    if not of_engine and is_megatron_folder(folder):
        return errors  # its shape is compared when the trainers read it
    where = f"--opd-teacher-load {folder}"
    try:
        model = read_scorer(folder, "--opd-teacher-load")
        check_weight_files(folder, "--opd-teacher-load")
        # The trainers compute with the shape of the policy: a teacher replaces their weights for a while.
        sees = sees_images(config)
        of_trainers = None if of_engine else read_model_shape(folder, "--opd-teacher-load", sees=sees)
        if of_trainers is not None and shape is not None and of_trainers != shape.trunk:
            errors.append(f"{where}: its shape differs from that of --hf-checkpoint; use --opd-type sglang")
    except ValueError as error:
        return [*errors, str(error)]
    if of_engine:
        size, server_args = options.opd_teacher_num_gpus_per_engine, options.opd_teacher_server_args
        errors += _engine_errors("--opd-teacher", size, server_args, model, config)
    return errors + _token_errors(config, shape, where, folder, model.vocab_size)


def _engine_errors(
    prefix: str, size: int, server_args: Mapping[str, object], model: ScorerModel, config: Config
) -> list[str]:
    from fusionrl.config import upstream_flags as upstream  # only where there is such a model

    per_node = config.cluster.num_gpus_per_node
    heads = {"attention heads": model.num_attention_heads}
    errors = size_errors(f"{prefix}-num-gpus-per-engine", size, heads, per_node)
    for name, value in server_args.items():
        values = [] if isinstance(value, bool) else value if isinstance(value, list) else [value]
        try:
            option = "--" + name.replace("_", "-")
            upstream.parse_with(upstream.sglang_parser(), option, list(map(str, values)), upstream.SGLANG_OWNED)
        except upstream.UpstreamError as error:
            errors.append(f"{prefix}-server-args {name}: {error}")
    return errors
