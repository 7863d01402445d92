"""Checks of rewards, of labels by the built-in reward, and of the sandbox for a model's programs."""

import importlib.util
import re
from collections.abc import Mapping

from fusionrl import sandbox
from fusionrl.base.packages import install_hint
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import readable_sets
from fusionrl.config.run_parts import has_own_rollout, has_own_source
from fusionrl.rewards.ifbench import LIBRARY, MISSING
from fusionrl.rewards.labels import BUDGET_S, LabelCheck
from fusionrl.rewards.registry import MODEL, REMOTE, RM_TYPES, asks_model, gives_dict, parse_rm_type, runs_programs


def reward_errors(config: Config) -> list[str]:
    """List what is wrong with the reward of a run and with what is taken off for length."""
    errors: list[str] = []
    reward, longest = config.reward, config.rollout.rollout_max_response_len
    if reward.rm_type is not None:
        key = reward.reward_key or ("" if reward.custom_rm_path else None)
        errors += [f"--rm-type {error}" for error in rm_type_errors(config, reward.rm_type, key, "--reward-key")]
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


def rm_type_errors(config: Config, rm_type: str, reward_key: str | None, key_flag: str) -> list[str]:
    """List what is wrong with a built-in reward: its name, what it needs, a dict without `reward_key`."""
    if rm_type == REMOTE:
        return []
    try:
        parts = parse_rm_type(rm_type)
    except ValueError as error:
        return [str(error)]
    errors = []
    if asks_model(rm_type) and config.reward.rm_model is None:
        errors.append(f"{rm_type} needs --rm-model: the Hugging Face folder of the reward model")
    for package in sorted({RM_TYPES[part.name].package or "" for part in parts.values() if part.name != MODEL} - {""}):
        if importlib.util.find_spec(package) is None:
            pip = package.replace("_", "-")
            cure = f"the package {pip} is not installed; {install_hint(pip)}"
            errors.append(f"{rm_type}: {cure if package != LIBRARY else f'{LIBRARY}.py is not found; {MISSING}'}")
    key = gives_dict(rm_type)
    if key is not None and reward_key is None:
        errors.append(f"{rm_type} gives a dict; choose a number of it, {key_flag} {key}")
    return errors


def run_label_check(config: Config, budget_s: float = BUDGET_S) -> LabelCheck | None:
    """Return the check of the rows of --prompt-data; None where no built-in reward grades with their labels."""
    reward, rollout = config.reward, config.rollout
    if has_own_source(config) or has_own_rollout(config) or config.run.load_debug_rollout_data:
        return None
    path = rollout.custom_generate_function_path
    return label_check(config, reward.rm_type, reward.custom_rm_path, generate_path=path, budget_s=budget_s)


def label_check(
    config: Config,
    rm_type: str | None,
    custom_rm_path: str | None,
    *,
    generate_path: str | None,
    overrides: Mapping[str, object] | None = None,
    budget_s: float = BUDGET_S,
) -> LabelCheck | None:
    """Return the check for a reward, as flags or an evaluation set name it; None: it is a user's, or there is none.

    generate_path  a user's generate function, which may give the samples other labels: then problems are warnings
    """
    if custom_rm_path is not None or config.run.mode == "sft":
        return None
    is_warning = generate_path is not None or bool(config.rollout.rollout_sample_hook_path)
    return LabelCheck(rm_type, overrides=overrides, is_warning=is_warning, budget_s=budget_s)


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
    sandbox.allow_weak(config.reward.allow_weak_sandbox)
    try:
        return str(sandbox.probe())
    except sandbox.SandboxError as error:
        raise ValueError(f"{flag}: {error}") from error
