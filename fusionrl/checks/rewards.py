"""Checks of the flags of rewards."""

from __future__ import annotations

import importlib.util
import re

from fusionrl.base.packages import install_hint
from fusionrl.config.config import Config
from fusionrl.rewards.ifbench import LIBRARY, MISSING
from fusionrl.rewards.registry import PACKAGES, REMOTE, asks_model, gives_dict, parse_rm_type


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
    for package in sorted({PACKAGES[part.name] for part in parts.values() if part.name in PACKAGES}):
        if importlib.util.find_spec(package) is None:
            pip = package.replace("_", "-")
            cure = f"the package {pip} is not installed; {install_hint(pip)}"
            errors.append(f"{rm_type}: {cure if package != LIBRARY else f'{LIBRARY}.py is not found; {MISSING}'}")
    key = gives_dict(rm_type)
    if key is not None and reward_key is None:
        errors.append(f"{rm_type} gives a dict; choose a number of it, {key_flag} {key}")
    return errors
