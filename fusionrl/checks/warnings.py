"""Warnings of settings that are allowed but probably not meant, shown with the plan and when a run starts.

Also flags that do nothing in this run. Each flag names its scopes where it is declared (`config.scopes`); a missing one
gives a warning, or an error for a value that only makes sense there.
"""

import contextlib
import re
from pathlib import Path

from fusionrl.checks.outputs import disk_warnings
from fusionrl.checks.training import adapter_warnings, algorithm_warnings, stack_warnings
from fusionrl.config.config import FIELDS, GROUP_OF, Config
from fusionrl.config.eval_sets import readable_sets
from fusionrl.config.hooks import SIGNATURES, flag_of
from fusionrl.config.parser import spell
from fusionrl.config.passed_flags import slime_notes
from fusionrl.config.rollout import DataGroup, RolloutGroup
from fusionrl.config.run_parts import (
    has_own_rollout,
    has_own_source,
    has_policy_loss,
    is_streamed,
    needs_correction,
    reads_prompts,
)
from fusionrl.config.scopes import ENGINES, TRAINERS, TRAINS, Scope, scopes_of
from fusionrl.data.rows import read_rows
from fusionrl.data.tokenizer import read_tokenizer_files
from fusionrl.models.engine_config import has_chat_template
from fusionrl.plan.pipeline_knobs import knobs_of
from fusionrl.plan.plan import Plan
from fusionrl.plan.render import open_file_warnings

# How chat templates mark turns: <|im_start|>, <|user|>, [INST], <start_of_turn>, <s>.
_MARK = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|\[/?INST\]|<(?:start|end)_of_turn>|</?s>")


def run_warnings(config: Config, plan: Plan) -> list[str]:
    """Return those of the flags, and those of a run on this machine."""
    return [
        *flag_warnings(config),
        *stack_warnings(config, plan.shape),
        *open_file_warnings(config, plan),
        *disk_warnings(config, plan),
    ]


def flag_warnings(config: Config) -> list[str]:
    """One text a finding, with flag and cure."""
    return [
        *algorithm_warnings(config),
        *adapter_warnings(config),
        *effect_warnings(config),
        *staleness_warnings(config),
        *context_warnings(config),
        *agent_warnings(config),
        *chat_warnings(config),
        *slime_notes(config.passthrough.slime),
    ]


def context_warnings(config: Config) -> list[str]:
    """Warn of a function in slime's form under context parallelism, which it may or may not support."""
    size, paths = config.model.context_parallel_size, vars(config.algorithm)
    fields = ("custom_tis_function_path", "custom_pg_loss_reducer_function_path")
    harm = f"each of the {size} context ranks calls it with whole responses; it must not sum over these ranks itself"
    return [
        f"{flag_of(name)} {paths[name]}: with --context-parallel-size {size} {harm}"
        for name in fields
        if paths[name] is not None and size > 1 and has_policy_loss(config)
    ]


def agent_warnings(config: Config) -> list[str]:
    """A text where agents get other answers than they ask for."""
    free = "answers to a forced tool_choice, a response_format or a grammar may lack the call, or not be JSON"
    return [f"--agent-free-sampling: {free}"] if config.rollout.agent_free_sampling else []


def staleness_warnings(config: Config) -> list[str]:
    """A text where tokens of older weights are trained on, and the loss does not know of it."""
    is_meant = needs_correction(config) and has_policy_loss(config) and not config.algorithm.use_tis
    if not is_streamed(config) or not is_meant or config.rollout.rollout_batch_size is None:
        return []
    try:
        knobs = knobs_of(config, None, 1)
    except ValueError:  # an error tells it
        return []
    age = f"tokens may be {knobs.max_staleness} versions old"
    if not knobs.max_staleness:
        if knobs.fetches_per_push == 1:
            return []
        age = f"weights have moved for the later of the {knobs.fetches_per_push} rollouts between two pushes"
    cure = "add --use-tis (decoupled PPO) or --use-rollout-logprobs"
    return [f"--pipeline {config.run.pipeline}: {age}, and the loss does not correct for it; {cure}"]


def chat_warnings(config: Config) -> list[str]:
    """The warning, where the default functions would give text to a model whose tokenizer has a chat template.

    A text that has marks of turns is rendered already, and a user's rollout, generate or data source function may
    render prompts itself. (A list of messages without --apply-chat-template is an error.)
    """
    data, rollout, folder = config.data, config.rollout, config.model.hf_checkpoint
    functions = (rollout.rollout_function_path, rollout.custom_generate_function_path)
    is_own = has_own_source(config) or reads_prompts(*functions)
    is_silent = config.run.mode == "sft" or data.apply_chat_template or config.run.load_debug_rollout_data is not None
    if is_own or is_silent or folder is None or not Path(folder).is_dir() or not has_chat_template(folder):
        return []
    flag, prompt = _first_prompt(config)
    marks = [token for token in read_tokenizer_files(folder).special_tokens if len(token) > 1]
    if not isinstance(prompt, str) or _MARK.search(prompt) or any(mark in prompt for mark in marks):
        return []
    text = "its prompts are plain text, and the tokenizer of --hf-checkpoint has a chat template"
    return [f"{flag}: {text}; add --apply-chat-template, or a chat model may never stop (a base model needs none)"]


def _first_prompt(config: Config) -> tuple[str, object]:
    """(the flag, the prompt of its first row); None where there is none, or none that can be read."""
    sets = [("--prompt-data", path, config.data.input_key) for path in config.data.prompt_data or []]
    if config.run.mode == "eval":
        sets = [(f"evaluation set {each.name}", each.path, each.input_key) for each in readable_sets(config)]
    for flag, path, key in sets[:1]:
        with contextlib.suppress(ValueError):  # data that cannot be read is an error elsewhere
            for _, row in read_rows(path, flag):
                return flag, row.get(key)
    return "", None


# A rollout function of the user's own may read these in any mode.
_READ_BY_ROLLOUTS = {*DataGroup.model_fields, *RolloutGroup.model_fields} - SIGNATURES.keys()

# Fields passed through to SGLang, its router and Megatron-core: by the name of their part in `Config.passthrough`.
PASSED: dict[str, tuple[str, Scope]] = {
    "sglang": ("--sglang-", ENGINES),
    "router": ("--router-", ENGINES),
    "transformer": ("--", TRAINERS),
    "optimizer": ("--", TRAINS),
    "ddp": ("--", TRAINS),
}


def effect_errors(config: Config) -> list[str]:
    """Return a line for each value, not the default, that does nothing for want of a flag without which it is wrong."""
    errors = []
    for field, info in FIELDS.items():
        value = getattr(getattr(config, GROUP_OF[field]), field)
        missing = next((scope for scope in scopes_of(info) if scope.refuses and not scope.holds(config)), None)
        if missing is not None and value != info.get_default(call_default_factory=True):
            cure = "add that, or leave it out" if missing.missing.startswith("without") else "leave it out"
            errors.append(f"{spell(field, value)} has {_reason(missing, config)}; {cure}")
    return errors


def effect_warnings(config: Config) -> list[str]:
    """A line for each reason why flags that were given (not those of a preset) do nothing, and hooks are not called."""
    lines: dict[str, list[str]] = {}
    for field in config.given():
        if has_own_rollout(config) and field in _READ_BY_ROLLOUTS:
            continue
        missing = next((scope for scope in scopes_of(FIELDS[field]) if not scope.holds(config)), None)
        if missing is not None:
            lines.setdefault(_reason(missing, config, is_hook=field in SIGNATURES), []).append(flag_of(field))
    for part, (prefix, scope) in PASSED.items():
        passed = getattr(config.passthrough, part)
        if passed and not scope.holds(config):
            flags = lines.setdefault(_reason(scope, config), [])
            flags += [name for name in (prefix + name.replace("_", "-") for name in passed) if name not in flags]
    return [f"{reason}: {', '.join(flags)}" for reason, flags in lines.items()]


def _reason(scope: Scope, config: Config, *, is_hook: bool = False) -> str:
    effect = "not called" if is_hook else "no effect"
    of_flags = scope.missing.startswith("with")
    return f"{effect} {scope.missing}" if of_flags else f"{effect} in {_run(config)}, where {scope.missing}"


def _run(config: Config) -> str:
    """The flags that decide which parts a run has: `--mode sft`, `--mode rl --debug-rollout-only`."""
    switches = {
        "--debug-rollout-only": config.run.debug_rollout_only,
        "--debug-train-only": config.run.debug_train_only,
        "--no-trainer": config.run.mode == "reject-sampling" and config.reject_sampling.no_trainer,
        "--loss-type sft_loss": config.run.mode == "rl" and config.algorithm.loss_type == "sft_loss",
    }
    return " ".join([f"--mode {config.run.mode}", *(flag for flag, is_on in switches.items() if is_on)])
