"""Checks of the evaluation sets and of what is kept by their results."""

import re

from fusionrl.checks.data import check_set, prompt_columns, tokenizer_files
from fusionrl.checks.rewards import label_check, rm_type_errors
from fusionrl.checks.rollout import eval_sampling_errors
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import EvalSet, eval_sets, readable_sets
from fusionrl.config.hooks import check_hook
from fusionrl.config.run_parts import DEFAULT_ROLLOUT
from fusionrl.plan.adapters import adapter_names
from fusionrl.rewards.labels import LabelCheck


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
        if eval_set.adapter is not None and eval_set.adapter not in (names_known := adapter_names(config)):
            known = f"the run has {', '.join(names_known)}" if names_known else "the run has none"
            errors.append(f"{where} adapter {eval_set.adapter!r}: {known} (--lora-adapters)")
        columns = prompt_columns(config).of_set(eval_set, eval_set.custom_generate_function_path is not None)
        key_flag, is_sft = "--eval-input-key" if file is None else "input_key", config.run.mode == "sft"
        ask_reward = _label_check(config, eval_set)
        check = check_set(config, files, eval_set.path, columns, (flag, key_flag), vocab_size, ask_reward)
        errors += check.errors
        warnings += check.warnings
        if not is_sft and _is_default(config):
            errors += eval_sampling_errors(config, eval_set, "" if file is None else flag, vocab_size)
        if file is not None and not is_sft:
            errors += [f"{flag} {error}" for error in _eval_set_errors(config, eval_set)]
    return errors


def _label_check(config: Config, eval_set: EvalSet) -> LabelCheck | None:
    if not _is_default(config):
        return None
    path, overrides = eval_set.custom_generate_function_path, eval_set.metadata_overrides
    return label_check(config, eval_set.rm_type, eval_set.custom_rm_path, generate_path=path, overrides=overrides)


def _is_default(config: Config) -> bool:
    return (config.rollout.eval_function_path or config.rollout.rollout_function_path) == DEFAULT_ROLLOUT


def _eval_set_errors(config: Config, eval_set: EvalSet) -> list[str]:
    """List what is wrong with a set of --eval-config; flags that it takes over are checked elsewhere."""
    errors = []
    has_own = eval_set.custom_generate_function_path is not None  # which may set the reward
    if _is_default(config) and eval_set.rm_type is None and eval_set.custom_rm_path is None and not has_own:
        errors.append("it has no reward; give rm_type or custom_rm_path")
    if eval_set.rm_type not in (None, config.reward.rm_type):
        of_type = rm_type_errors(config, eval_set.rm_type, eval_set.reward_key, "reward_key")
        errors += [f"rm_type {error}" for error in of_type]
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
