"""Checks over several flags and over what they name: all mistakes are found before Ray starts, and listed at once."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fusionrl.algorithms.estimators import ACCURACY
from fusionrl.base.quiet import quiet
from fusionrl.checks.algorithm import algorithm_errors, routing_errors
from fusionrl.checks.lengths import flag_length_errors, length_errors
from fusionrl.checks.sandbox import sandbox_of_run
from fusionrl.checks.scorers import scorer_errors
from fusionrl.config.config import Config
from fusionrl.config.divisors import dividing
from fusionrl.config.eval_sets import EvalSet, eval_sets
from fusionrl.config.groups import RolloutGroup
from fusionrl.config.hooks import check_hook, flag_of, hook_paths
from fusionrl.config.parts import estimator_of
from fusionrl.config.pipelines import AVAILABLE
from fusionrl.config.presets import NONZERO_STD
from fusionrl.data.prompts import PromptColumns, check_file, load_prompts, template_probe
from fusionrl.data.rows import FORMATS, parse_sets, read_rows
from fusionrl.data.template_probe import TemplateProbe
from fusionrl.data.tokenizer_files import TokenizerFiles, read_tokenizer_files
from fusionrl.engines.delta import CHECKSUM_PACKAGES, COMPRESSION_PACKAGE
from fusionrl.models.quantization import BlockFp8, read_quantization
from fusionrl.models.scorers import has_chat_template
from fusionrl.models.shape import ModelShape, read_model_shape
from fusionrl.models.weight_files import check_weight_files
from fusionrl.plan.layout import sequence_multiple
from fusionrl.rewards.registry import PACKAGES, REMOTE, asks_model, gives_dict, parse_rm_type


@dataclass(frozen=True)
class Checked:
    """What the checks read on the way: the model's shape (None: it could not be read), the number of prompts, the
    quantisation of the model's weights, what is odd about the data that can be trained on all the same, and the sandbox
    that this machine gives (None: the run has no use for it)."""

    shape: ModelShape | None
    num_prompts: int
    quantization: BlockFp8 | None = None
    data_warnings: tuple[str, ...] = ()
    sandbox: str | None = None


T = TypeVar("T")
# Flags of weight pushes that only those by files look at.
_OF_DISK = (
    *("update_weight_mode", "update_weight_disk_dir", "update_weight_disk_keep_files"),
    *("update_weight_local_checkpoint_dir", "update_weight_delta_encoding", "update_weight_delta_checksum"),
    "custom_update_weight_post_write_path",
)


def validate(config: Config) -> tuple[Checked, list[str]]:
    """Every mistake in the configuration, as messages that name flag, value and cure."""
    errors: list[str] = []
    shape = _attempt(errors, lambda: _check_model(config))
    quantization = _attempt(errors, lambda: _check_quantization(config)) if shape else None
    _check_required(config, errors)
    _check_modes(config, errors)
    _check_parallel(config, shape, errors)
    _check_rollout(config, shape, errors)
    _check_rewards(config, errors)
    sandbox = _attempt(errors, lambda: sandbox_of_run(config))
    errors += scorer_errors(config, shape)
    _check_hooks(config, errors)
    warnings: list[str] = []
    num_before = len(errors)
    num_prompts = _check_data(config, errors, warnings)
    _check_eval(config, errors, warnings)
    errors += length_errors(config, shape, reads_data=len(errors) == num_before)
    _check_path_templates(config, errors)
    errors += algorithm_errors(config)
    errors += routing_errors(config, shape)
    if config.run.use_tensorboard and importlib.util.find_spec("tensorboard") is None:
        errors.append("--use-tensorboard: the package tensorboard is not installed; pip install tensorboard")
    _check_keep_best(config, errors)
    _check_weight_files(config, errors)
    for name in ("use_dynamic_batch_size", "balance_data"):
        if not getattr(config.train, name):
            errors.append(f"--no-{name.replace('_', '-')}: it is always so here; leave the flag out")
    if config.train.lr_warmup_init > config.train.lr:
        errors.append(
            f"--lr-warmup-init {config.train.lr_warmup_init:g} is over --lr {config.train.lr:g}; a warm-up rises to it"
        )
    if config.run.resume and config.run.run_dir is None:
        errors.append("--resume: name the run's folder with --run-dir")
    return Checked(shape, num_prompts, quantization, tuple(warnings), sandbox), errors


def validate_flags(config: Config, shape: ModelShape | None) -> list[str]:
    """The mistakes that flags and the model's shape alone show: for a cluster elsewhere, of which nothing is read."""
    errors: list[str] = []
    _check_parallel(config, shape, errors)
    _check_rollout(config, shape, errors)
    _check_modes(config, errors)
    errors += flag_length_errors(config, shape)
    return errors + algorithm_errors(config) + routing_errors(config, shape)


def _attempt(errors: list[str], check: Callable[[], T | None]) -> T | None:
    try:
        return check()
    except ValueError as error:
        errors.append(str(error))
        return None


def _check_model(config: Config) -> ModelShape | None:
    folder = config.model.hf_checkpoint
    if folder is None:
        raise ValueError("--hf-checkpoint is required: a Hugging Face model folder")
    shape = read_model_shape(folder)
    engines = config.run.mode != "sft" and not config.run.debug_train_only
    if config.model.debug_random_weights:
        if config.model.megatron_checkpoint is not None:
            raise ValueError("--debug-random-weights and --megatron-checkpoint exclude each other")
        if engines:
            raise ValueError("--debug-random-weights: engines need real weights; use --mode sft or --debug-train-only")
    elif engines or config.model.megatron_checkpoint is None:
        check_weight_files(folder)
    names = {path.name for path in Path(folder).iterdir()}
    if not names & {"tokenizer.json", "tokenizer.model", "vocab.json"}:
        raise ValueError(f"--hf-checkpoint {folder}: it has no tokenizer (tokenizer.json)")
    if config.model.ref_load is not None:
        reference = read_model_shape(config.model.ref_load, "--ref-load")
        if reference != shape:
            raise ValueError(
                f"--ref-load {config.model.ref_load}: its shape differs from that of --hf-checkpoint {folder}"
            )
        check_weight_files(config.model.ref_load, "--ref-load")
    if config.model.megatron_checkpoint is not None and not Path(config.model.megatron_checkpoint).is_dir():
        raise ValueError(f"--megatron-checkpoint {config.model.megatron_checkpoint}: there is no such folder")
    return shape


def _check_quantization(config: Config) -> BlockFp8 | None:
    """Where there are trainers: they read quantised weights, and push them as the engines have them."""
    run, folder = config.run, config.model.hf_checkpoint
    if run.mode == "eval" or run.debug_rollout_only or config.reject_sampling.no_trainer:
        return None
    assert folder is not None
    own = config.passthrough.sglang.get("quantization")
    if own is not None:
        raise ValueError(
            f"--sglang-quantization {own}: weights are pushed as --hf-checkpoint has them, and the engines would"
            " quantise theirs once more; leave it out, and give a checkpoint that is quantised (quant_method fp8)"
        )
    if config.model.ref_load is not None:
        read_quantization(config.model.ref_load, "--ref-load")
    return read_quantization(folder)


def _check_required(config: Config, errors: list[str]) -> None:
    """Flags that a run cannot do without; a plan for a cluster elsewhere can."""
    run, mode = config.run, config.run.mode
    if mode != "eval":
        if config.data.prompt_data is None and run.load_debug_rollout_data is None:
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
    needs_reward = needs_reward and not custom_rollout and not may_lack
    if needs_reward and config.reward.rm_type is None and config.reward.custom_rm_path is None:
        errors.append(f"a reward is required in --mode {mode}: --rm-type or --custom-rm-path")
    no_limit = config.rollout.rollout_max_response_len is None and not own_rewards
    if mode != "sft" and not run.debug_train_only and no_limit:
        errors.append(f"--rollout-max-response-len is required in --mode {mode}")
    if mode == "eval" and not config.eval.has_sets:
        errors.append("--eval-prompt-data is required in --mode eval: pairs of name and file (or --eval-config)")


def _check_modes(config: Config, errors: list[str]) -> None:
    """Flags that do not go together with the mode, or with one another."""
    run, mode = config.run, config.run.mode
    if run.pipeline not in AVAILABLE:
        errors.append(f"--pipeline {run.pipeline}: not available yet; available is {', '.join(AVAILABLE)}")
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


def _check_parallel(config: Config, shape: ModelShape | None, errors: list[str]) -> None:
    size = config.cluster.rollout_num_gpus_per_engine
    if shape and shape.num_attention_heads % size:
        errors.append(
            f"--rollout-num-gpus-per-engine {size} does not divide the model's"
            f" {shape.num_attention_heads} attention heads; {dividing(shape.num_attention_heads, size)}"
        )
    if size > config.cluster.num_gpus_per_node:
        errors.append(f"--rollout-num-gpus-per-engine {size}: an engine over several nodes is not available yet")


def _check_rollout(config: Config, shape: ModelShape | None, errors: list[str]) -> None:
    rollout, reward = config.rollout, config.reward
    if config.run.mode == "rl" and (rollout.rollout_top_p != 1.0 or rollout.rollout_top_k != -1):
        errors.append(
            "--rollout-top-p / --rollout-top-k: the engine's log-probs are those of the full distribution, so"
            " training on truncated samples would be biased; leave them at 1.0 and -1 (evaluation has its own flags)"
        )
    limit = rollout.rollout_max_context_len
    if rollout.rollout_max_response_len and rollout.rollout_min_response_len > rollout.rollout_max_response_len:
        errors.append(
            f"--rollout-min-response-len {rollout.rollout_min_response_len} is over --rollout-max-response-len"
            f" {rollout.rollout_max_response_len}"
        )
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
    for name in ("interval", "timeout", "first_wait"):
        field = f"rollout_health_check_{name}"
        value = getattr(rollout, field)
        if not rollout.use_fault_tolerance and value != RolloutGroup.model_fields[field].default:
            errors.append(f"--{field.replace('_', '-')} {value:g} has no effect without --use-fault-tolerance; add it")
    if rollout.rollout_ignore_eos and (rollout.rollout_stop or rollout.rollout_stop_token_ids):
        errors.append("--rollout-ignore-eos makes no sense with --rollout-stop or --rollout-stop-token-ids")
    if reward.rm_type and reward.custom_rm_path:
        errors.append("--rm-type and --custom-rm-path exclude each other; leave one out")
    if reward.group_rm and not reward.custom_rm_path:
        errors.append("--group-rm needs --custom-rm-path: the built-in rewards score one sample")
    no_reward = config.algorithm.use_opd and reward.rm_type is None and reward.custom_rm_path is None
    errors += _filter_errors(rollout, no_reward)


def _filter_errors(rollout: RolloutGroup, no_reward: bool) -> list[str]:
    """Filters of ours that would drop every group, and bounds that do nothing."""
    path, samples, plain = rollout.dynamic_sampling_filter_path, rollout.n_samples_per_prompt, RolloutGroup()
    low, high = rollout.accuracy_lower_bound, rollout.accuracy_upper_bound
    if path != ACCURACY:
        for name in ("accuracy_lower_bound", "accuracy_upper_bound"):
            if getattr(rollout, name) != getattr(plain, name):
                return [f"{flag_of(name)} {getattr(rollout, name)} has no effect without its filter, {ACCURACY}"]
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


def _rm_type_errors(config: Config, rm_type: str, reward_key: str | None, key_flag: str) -> list[str]:
    """What is wrong with a built-in reward: its name, what it needs, a dict without `reward_key`."""
    if rm_type == REMOTE:
        return []
    try:
        parts = parse_rm_type(rm_type)
    except ValueError as error:
        return [str(error)]
    errors = []
    if asks_model(rm_type) and config.reward.rm_model is None:
        errors.append(f"{rm_type} needs --rm-model: the Hugging Face folder of the reward model")
    for package in sorted({PACKAGES[part.name] for part in parts.values() if part.name in PACKAGES}):
        if importlib.util.find_spec(package) is None:
            pip = package.replace("_", "-")
            errors.append(f"{rm_type}: the package {pip} is not installed; pip install {pip}")
    key = gives_dict(rm_type)
    if key is not None and reward_key is None:
        errors.append(f"{rm_type} gives a dict; choose a number of it, {key_flag} {key}")
    return errors


def _check_rewards(config: Config, errors: list[str]) -> None:
    reward, longest = config.reward, config.rollout.rollout_max_response_len
    if reward.rm_type is not None:
        key = reward.reward_key or ("" if reward.custom_rm_path else None)
        errors += [f"--rm-type {error}" for error in _rm_type_errors(config, reward.rm_type, key, "--reward-key")]
    url = reward.rm_url
    if (reward.rm_type == REMOTE) != (url is not None):
        errors.append(f"--rm-type {REMOTE} and --rm-url go together; give both")
    if url is not None and not re.match(r"https?://[^/]+", url):
        errors.append(f"--rm-url {url}: an address begins with http:// or https://")
    if reward.rm_format_regex is not None:
        try:
            re.compile(reward.rm_format_regex)
        except re.error as error:
            errors.append(f"--rm-format-regex {reward.rm_format_regex}: no regular expression: {error}")
    if reward.overlong_buffer_len is None and reward.overlong_penalty_factor != 1:
        errors.append("--overlong-penalty-factor has no effect without --overlong-buffer-len; add it")
    for flag, value in (
        ("--overlong-buffer-len", reward.overlong_buffer_len),
        ("--length-penalty-coef", reward.length_penalty_coef),
    ):
        if value and config.run.mode != "rl":
            errors.append(f"{flag} {value} belongs to --mode rl, not to {config.run.mode}")
        if value and longest is None:
            errors.append(f"{flag} {value} needs --rollout-max-response-len")
        if value and reward.custom_reward_post_process_path is not None:
            errors.append(
                f"{flag} {value} and --custom-reward-post-process-path exclude each other: that function decides"
            )
    if reward.overlong_buffer_len and longest is not None and reward.overlong_buffer_len > longest:
        errors.append(
            f"--overlong-buffer-len {reward.overlong_buffer_len} is longer than --rollout-max-response-len {longest}"
        )


def _check_hooks(config: Config, errors: list[str]) -> None:
    for field, path in hook_paths(vars(config.to_args())):
        if error := check_hook(field, path):
            errors.append(error)


def prompt_columns(config: Config) -> PromptColumns:
    """What the flags say about the columns of the prompt data."""
    data = config.data
    return PromptColumns(
        data.input_key,
        data.label_key,
        data.metadata_key,
        data.tool_key,
        data.apply_chat_template,
        data.apply_chat_template_kwargs,
        data.rollout_max_prompt_len,
    )


def _tokenizer_files(config: Config) -> TokenizerFiles | None:
    folder = config.model.hf_checkpoint
    return read_tokenizer_files(folder) if folder is not None and Path(folder).is_dir() else None


def _template_probe(config: Config, files: TokenizerFiles | None, columns: PromptColumns) -> TemplateProbe | None:
    if files is None:
        return None

    def load() -> Any:
        from fusionrl.data.tokenizer import load_tokenizer

        return load_tokenizer(str(config.model.hf_checkpoint))

    loss_mask_type = config.data.loss_mask_type if config.run.mode == "sft" else None
    return template_probe(files, columns, load, loss_mask_type)


def _check_prompt_data(config: Config, errors: list[str], warnings: list[str]) -> int:
    """Number of prompts of all sets, which --num-epoch counts; 0 where it is not known."""
    data, is_sft = config.data, config.run.mode == "sft"
    specs, weights, columns = data.prompt_data or [], data.prompt_data_weights, prompt_columns(config)
    given = f"--prompt-data-weights {' '.join(map(str, weights))}"
    if weights and len(weights) != len(specs):
        errors.append(f"{given}: {len(weights)} weights for {len(specs)} sets of --prompt-data; give one for each")
    if any(weight <= 0 for weight in weights):
        errors.append(f"{given}: each must be over 0; leave the other sets out")
    try:
        parse_sets(specs)
    except ValueError as error:
        errors.append(str(error))
        return 0
    total, num_errors, files = 0, len(errors), _tokenizer_files(config)
    probe, tokens = _template_probe(config, files, columns), files.special_tokens if files else ()
    for spec in specs:
        check = check_file(
            spec, columns, "--prompt-data", "--input-key", is_sft=is_sft, special_tokens=tokens, probe=probe
        )
        errors += check.errors
        warnings += check.warnings
        total += check.num_rows
        if is_sft and not check.errors and _has_template(config) is False:
            first = next(read_rows(spec))[1][data.input_key]
            if isinstance(first, list):
                errors.append(
                    f"--mode sft: conversations need a chat template; the tokenizer of --hf-checkpoint"
                    f" {config.model.hf_checkpoint} has none"
                )
    if len(errors) > num_errors:
        return 0  # how many rows of a bad set are prompts is nothing to count epochs by
    is_filtered = data.rollout_max_prompt_len is not None and not is_sft
    if is_filtered and config.run.num_rollout is None and _has_template(config) is not None:
        return _count_prompts(config, specs, columns, errors)
    return total


def _count_prompts(config: Config, specs: list[str], columns: PromptColumns, errors: list[str]) -> int:
    """Prompts that are not too long. It costs the reading of a tokenizer: only where epochs are counted by it."""
    from fusionrl.data.tokenizer import load_tokenizer

    try:
        with quiet():
            tokenizer = load_tokenizer(str(config.model.hf_checkpoint))
            return sum(len(load_prompts(spec, tokenizer, columns).samples) for spec in specs)
    except (ValueError, OSError) as error:
        errors.append(str(error))
        return 0


def _check_data(config: Config, errors: list[str], warnings: list[str]) -> int:
    data, count = config.data, 0
    if data.prompt_data is not None and config.run.mode != "eval":
        count = _check_prompt_data(config, errors, warnings)
    if data.apply_chat_template and _has_template(config) is False:
        errors.append(
            f"--apply-chat-template: the tokenizer of --hf-checkpoint {config.model.hf_checkpoint} has no chat template"
        )
    return count


def _check_eval(config: Config, errors: list[str], warnings: list[str]) -> None:
    pairs, file = config.eval.eval_prompt_data, config.eval.eval_config
    if len(pairs) % 2:
        errors.append(f"--eval-prompt-data {' '.join(pairs)}: give pairs of name and file")
        return
    if pairs and file is not None:
        errors.append(f"--eval-config {file} and --eval-prompt-data exclude each other: the file names the sets")
        return
    try:
        sets = eval_sets(config.to_args())
    except ValueError as error:
        errors += str(error).splitlines()
        return
    files = _tokenizer_files(config)
    for one in sets:
        flag = "--eval-prompt-data" if file is None else f"--eval-config {file}: set {one.name}:"
        where = f"{flag} {one.name}:" if file is None else flag
        if not re.fullmatch(r"[\w-]+", one.name, re.ASCII):
            errors.append(
                f"{where} the name of a set is of letters, digits, '_' and '-'"
                + (" (give pairs of name and file)" if file is None else "")
            )
        if [other.name for other in sets].count(one.name) > 1:
            errors.append(f"{where} two sets have this name")
        columns = replace(
            prompt_columns(config),
            input_key=one.input_key,
            label_key=one.label_key,
            metadata_key=one.metadata_key,
            tool_key=one.tool_key,
        )
        key_flag, is_sft = "--eval-input-key" if file is None else "input_key", config.run.mode == "sft"
        probe, tokens = _template_probe(config, files, columns), files.special_tokens if files else ()
        check = check_file(one.path, columns, flag, key_flag, is_sft=is_sft, special_tokens=tokens, probe=probe)
        errors += check.errors
        warnings += check.warnings
        if file is not None and not is_sft:
            errors += [f"{flag} {error}" for error in _eval_set_errors(config, one)]


def _eval_set_errors(config: Config, one: EvalSet) -> list[str]:
    """What is wrong with the settings of a set of --eval-config; flags that it takes over are checked elsewhere."""
    found = []
    rollout = config.rollout
    is_default = (rollout.eval_function_path or rollout.rollout_function_path) == RolloutGroup().rollout_function_path
    if is_default and one.rm_type is None and one.custom_rm_path is None:
        found.append("it has no reward; give rm_type or custom_rm_path")
    if one.rm_type not in (None, config.reward.rm_type):
        found += [f"rm_type {error}" for error in _rm_type_errors(config, one.rm_type, one.reward_key, "reward_key")]
    if one.max_response_len is None:
        found.append("it has no max_response_len, and --rollout-max-response-len is not given")
    elif one.min_new_tokens > one.max_response_len:
        found.append(f"min_new_tokens {one.min_new_tokens} is over max_response_len {one.max_response_len}")
    for field in ("custom_rm_path", "custom_generate_function_path"):
        path = getattr(one, field)
        if path is not None and path != getattr(config.to_args(), field) and (error := check_hook(field, path)):
            found.append(error)
    return found


def _has_template(config: Config) -> bool | None:
    """Whether the tokenizer has a chat template; None where that is not known."""
    folder = config.model.hf_checkpoint
    return has_chat_template(folder) if folder is not None and Path(folder).is_dir() else None


def _check_keep_best(config: Config, errors: list[str]) -> None:
    best = config.checkpoint.keep_best
    if best is None:
        return
    if config.checkpoint.keep_checkpoints is None:
        errors.append(f"--keep-best {best} needs --keep-checkpoints; without it all are kept")
    try:
        names = [f"eval/{one.name}/accuracy" for one in eval_sets(config.to_args())]
    except ValueError:  # told by _check_eval
        names = []
    sets = {name.rsplit("/", 1)[0] for name in names}
    if config.eval.eval_interval is None or best.rsplit("/", 1)[0] not in sets:
        known = " or ".join(names) or "eval/<set>/accuracy of a set of --eval-prompt-data"
        errors.append(f"--keep-best {best}: no evaluation gives that; it can be {known}, with --eval-interval")


def _check_weight_files(config: Config, errors: list[str]) -> None:
    """The flags of weight pushes by files."""
    weights, fields = config.weights, type(config.weights).model_fields
    given = [field for field in _OF_DISK if getattr(weights, field) != fields[field].default]
    if weights.update_weight_transport != "disk":
        errors += [f"{flag_of(field)}: it needs --update-weight-transport disk" for field in given]
        return
    is_delta = weights.update_weight_mode == "delta"
    if is_delta and weights.update_weight_local_checkpoint_dir is None:
        errors.append(
            "--update-weight-mode delta needs --update-weight-local-checkpoint-dir: a folder on each host of engines,"
            " with room for the weights, where the changes are applied"
        )
    if not is_delta and "update_weight_delta_encoding" in given:
        errors.append("--update-weight-delta-encoding has no effect without --update-weight-mode delta; add it")
    kind = weights.update_weight_delta_checksum
    needed = {f"--update-weight-delta-checksum {kind}": CHECKSUM_PACKAGES.get(kind)}
    needed["--update-weight-mode delta"] = COMPRESSION_PACKAGE if is_delta else None
    for flag, package in needed.items():
        if package is not None and importlib.util.find_spec(package) is None:
            errors.append(f"{flag}: the package {package} is not installed; pip install {package}")


def _check_path_templates(config: Config, errors: list[str]) -> None:
    run = config.run
    templates = {
        "--load-debug-rollout-data": run.load_debug_rollout_data,
        "--save-debug-rollout-data": run.save_debug_rollout_data,
        "--save-hf": config.checkpoint.save_hf,
    }
    for flag, template in templates.items():
        if template is None:
            continue
        try:
            first, second = (template.format(rollout_id=rollout_id) for rollout_id in (0, 1))
        except (KeyError, IndexError, ValueError):
            errors.append(f"{flag} {template}: {{rollout_id}} is the only field that a path may have")
            continue
        if flag == "--save-debug-rollout-data" and first == second:
            errors.append(f"{flag} {template}: every rollout would overwrite the one before; add {{rollout_id}}")
        if flag == "--load-debug-rollout-data" and not run.resume and not Path(first).is_file():
            errors.append(f"{flag} {template}: there is no file {first}")
