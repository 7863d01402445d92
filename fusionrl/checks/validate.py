"""Checks over several flags and over what they name: all mistakes are found before Ray starts, and listed at once.

Each subject has a file in this room; a function `…_errors` returns messages that name flag, value and cure. Here are
those of modes, --in-process, and engines that only evaluate or that others start.
"""

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from fusionrl.base.environment import ENGINE_KEY
from fusionrl.base.wording import attempt
from fusionrl.checks.data import check_prompts
from fusionrl.checks.images import engine_image_errors, image_errors
from fusionrl.checks.lengths import flag_length_errors, length_errors
from fusionrl.checks.model import (
    checked_quantization,
    checked_shape,
    disk_push_errors,
    engine_size_errors,
    further_layer_errors,
    unreadable_errors,
    unserved_errors,
    weight_shape_errors,
)
from fusionrl.checks.outputs import output_errors, template_errors
from fusionrl.checks.rewards import reward_errors, sandbox_of_run, scorer_errors
from fusionrl.checks.rollout import evaluation_errors, keep_best_errors, rollout_errors, rollout_sampling_errors
from fusionrl.checks.training import adapter_errors, adapter_folder_errors, algorithm_errors, routing_errors
from fusionrl.checks.warnings import effect_errors
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import has_pairs
from fusionrl.config.hooks import check_hook, hook_paths
from fusionrl.config.run_parts import estimator_of, has_own_rollout, has_own_source, is_streamed
from fusionrl.data.rows import FORMATS
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.shape import ModelShape
from fusionrl.models.shape_claims import claim_errors
from fusionrl.observe.run_dir import engine_url
from fusionrl.plan.pipeline_knobs import stream_errors
from fusionrl.rewards.registry import rm_type_errors


@dataclass(frozen=True)
class Checked:
    """The results of the checks that a plan builds on."""

    shape: ModelShape | None  # the model's; None: it could not be read
    num_prompts: int  # of all sets; 0: not known
    quantization: BlockFp8 | None = None  # of the model's weights
    data_warnings: tuple[str, ...] = ()  # odd things about data that can be trained on all the same
    sandbox: str | None = None  # the one that this machine gives; None: the run has no use for it


def validate(config: Config) -> tuple[Checked, list[str]]:
    """Return what the checks read on the way, and every mistake in the configuration."""
    errors: list[str] = place_errors(config)
    if closed := unreadable_errors(config):  # nothing else can be said of them
        return Checked(None, 0), errors + closed
    shape = attempt(errors, lambda: checked_shape(config))
    quantization = attempt(errors, lambda: checked_quantization(config)) if shape else None
    errors += weight_shape_errors(config)
    vocab_size = shape.vocab_size if shape is not None else None
    errors += missing_flags(config) + in_process_errors(config) + guest_errors(config)
    reward = config.reward
    key = reward.reward_key or ("" if reward.custom_rm_path else None)  # the user's function may return a number
    errors += rm_type_errors("--rm-type", reward.rm_type, reward.rm_model, key, "--reward-key") + reward_errors(config)
    sandbox = attempt(errors, lambda: sandbox_of_run(config))
    errors += scorer_errors(config, shape)
    hooks = hook_paths(vars(config.to_args()))
    errors += [error for field, path in hooks if (error := check_hook(field, path))]
    warnings: list[str] = []
    errors += image_errors(config, shape) + adapter_folder_errors(config, shape) if shape else []
    num_prompts = check_prompts(config, errors, warnings, vocab_size)
    errors += evaluation_errors(config, warnings, vocab_size)
    errors += length_errors(config, shape) + template_errors(config) + _flag_errors(config, shape)
    errors += keep_best_errors(config) + disk_push_errors(config) + further_layer_errors(config)
    errors += _train_errors(config) + output_errors(config)
    return Checked(shape, num_prompts, quantization, tuple(warnings), sandbox), errors


def validate_flags(config: Config, shape: ModelShape | None) -> list[str]:
    """List the mistakes that flags and the model's shape show: of a cluster elsewhere nothing else is read."""
    return _flag_errors(config, shape) + flag_length_errors(config, shape)


def _flag_errors(config: Config, shape: ModelShape | None) -> list[str]:
    errors = engine_size_errors(config, shape) + unserved_errors(config, shape) + engine_image_errors(config, shape)
    errors += rollout_errors(config) + mode_errors(config)
    errors += rollout_sampling_errors(config, None if shape is None else shape.vocab_size)
    errors += adapter_errors(config) + algorithm_errors(config) + routing_errors(config, shape) + effect_errors(config)
    where = f"the config.json of --hf-checkpoint {config.model.hf_checkpoint}"
    return errors + ([] if shape is None else claim_errors(shape, config.passthrough.slime, where))


def _train_errors(config: Config) -> list[str]:
    train = config.train
    errors = [
        f"--no-{name.replace('_', '-')}: it is always so here; leave the flag out"
        for name in ("use_dynamic_batch_size", "balance_data")
        if not getattr(train, name)
    ]
    if train.lr_warmup_fraction is not None and train.lr_warmup_iters:
        flags = f"--lr-warmup-fraction {train.lr_warmup_fraction:g} and --lr-warmup-iters {train.lr_warmup_iters}"
        errors.append(f"{flags} say the same; leave one out")
    if train.lr_warmup_init > train.lr:
        errors.append(f"--lr-warmup-init {train.lr_warmup_init:g} is over --lr {train.lr:g}; a warm-up rises to it")
    return errors


def missing_flags(config: Config) -> list[str]:
    """List flags that a run cannot do without; a plan for a cluster elsewhere can."""
    errors: list[str] = []
    run, mode = config.run, config.run.mode
    if mode != "eval":
        if config.data.prompt_data is None and not has_own_source(config) and run.load_debug_rollout_data is None:
            errors.append(f"--prompt-data is required in --mode {mode}: {FORMATS}")
        if config.rollout.rollout_batch_size is None:
            errors.append(f"--rollout-batch-size is required in --mode {mode}: prompts of one step")
        if run.num_rollout is None and run.num_epoch is None:
            errors.append(f"--num-rollout or --num-epoch is required in --mode {mode}")
    own_rewards = mode == "eval" and config.eval.eval_config is not None  # each set has to name its own
    rollout, algorithm = config.rollout, config.algorithm
    sources = (  # of a reward; a function or an agent that gives none gets an error
        *(config.reward.rm_type, config.reward.custom_rm_path, has_own_rollout(config)),
        *(rollout.custom_generate_function_path, rollout.agent_path),
        algorithm.use_opd and estimator_of(algorithm).role != "prm",
    )
    if mode != "sft" and not run.debug_train_only and not own_rewards:
        if not any(sources):
            errors.append(f"a reward is required in --mode {mode}: --rm-type or --custom-rm-path")
        if rollout.rollout_max_response_len is None:
            errors.append(f"--rollout-max-response-len is required in --mode {mode}")
    if mode == "eval" and not config.eval.has_sets:
        errors.append("--eval-prompt-data is required in --mode eval: pairs of name and file (or --eval-config)")
    return errors


def mode_errors(config: Config) -> list[str]:
    """List flags that do not go together with the mode, or with one another."""
    run, mode = config.run, config.run.mode
    errors = stream_errors(config) + eval_engine_errors(config)
    if run.debug_train_only and run.debug_rollout_only:
        errors.append("--debug-train-only and --debug-rollout-only exclude each other")
    elif mode == "eval" and (run.debug_train_only or run.debug_rollout_only):
        flag = "--debug-train-only" if run.debug_train_only else "--debug-rollout-only"
        errors.append(f"{flag}: --mode eval runs the engines alone, on its sets; leave it out")
    if run.debug_train_only and mode == "rl" and run.load_debug_rollout_data is None:
        errors.append("--debug-train-only in --mode rl needs --load-debug-rollout-data")
    if config.model.megatron_checkpoint is not None and (mode == "eval" or config.reject_sampling.no_trainer):
        errors.append("--megatron-checkpoint: no trainer pushes its weights; convert it with tools/convert.py to-hf")
    return errors


_REPLAY = ", or replay a whole run's --save-debug-rollout-data (--debug-train-only --load-debug-rollout-data)"


def in_process_errors(config: Config) -> list[str]:
    """List flags that need several trainers or Ray."""
    run, cluster = config.run, config.cluster
    if not run.in_process:
        return []
    role, num_ranks = estimator_of(config.algorithm).role, cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    errors = []
    if num_ranks > 1:
        cure = "give --actor-num-nodes 1 --actor-num-gpus-per-node 1"
        errors.append(f"--in-process: it runs one trainer rank, not {num_ranks}; {cure}{_REPLAY}")
    if role is not None and run.mode == "rl":
        flag = f"--advantage-estimator {config.algorithm.advantage_estimator}"
        errors.append(f"--in-process: {flag} trains a {role}, too; leave one out")
    if is_streamed(config):
        flag = f"--pipeline {run.pipeline}"
        errors.append(f"--in-process: {flag} generates while it trains; give --pipeline on-policy{_REPLAY}")
    others = {
        "--ray-address": cluster.ray_address is not None,
        "--dashboard": run.dashboard,
        "--async-save": config.checkpoint.async_save,
        "--use-fault-tolerance": config.rollout.use_fault_tolerance,
        "--eval-num-gpus": bool(config.eval.eval_num_gpus),
    }
    return errors + [f"--in-process: {flag} needs other processes; leave one out" for flag, on in others.items() if on]


def place_errors(config: Config, prefix: str = sys.prefix, package: str = str(Path(__file__).parents[1])) -> list[str]:
    """List folders with white space in their path; a run in one process has no workers of Ray."""
    if config.run.in_process:
        return []
    places = {"the Python environment": prefix, "fusionrl": package}
    return [
        f"{name} is in {path!r}: Ray starts no worker from a path with white space; move it, or use --in-process"
        for name, path in places.items()
        if any(character.isspace() for character in path)
    ]


def eval_engine_errors(config: Config) -> list[str]:
    """List what does not go together with engines of evaluation's own."""
    best = config.checkpoint.keep_best
    if not config.eval.eval_num_gpus:
        return []
    flag, errors = f"--eval-num-gpus {config.eval.eval_num_gpus}", []
    if config.run.mode == "eval":
        return [f"{flag}: in --mode eval all engines evaluate; give --rollout-num-gpus"]
    if config.cluster.colocate:
        errors.append(f"{flag}: with --colocate an evaluation has the engines to itself; leave one out")
    if config.weights.update_weight_transport == "ipc":
        errors.append(f"{flag}: --update-weight-transport ipc only reaches engines on trainers' devices; take disk")
    if best is not None:
        errors.append(f"{flag}: its results come too late for --keep-best {best}; leave one out")
    return errors


def guest_errors(config: Config) -> list[str]:
    """List what is wrong with the addresses and with their key. No engine is asked."""
    errors, seen = [], set[str]()
    flag, addresses = "--rollout-external-engine-addrs", config.cluster.rollout_external_engine_addrs
    if addresses and config.run.in_process:
        return [f"{flag} {addresses[0]}: --in-process takes no engines of others; leave one out"]
    with contextlib.suppress(ValueError):  # another check reports a group that cannot be read
        if addresses and has_pairs(config.cluster.engine_group):
            return [f"{flag} {addresses[0]}: not with --engine-group of role prefill (pairs); leave one out"]
    for address in addresses:
        try:
            url = engine_url(address)
        except ValueError as error:
            errors.append(f"{flag} {address}: {error}")
            continue
        if url in seen:
            errors.append(f"{flag} {address}: it is there twice; leave one out")
        seen.add(url)
    if os.environ.get(ENGINE_KEY, "").startswith("-"):
        errors.append(f"{ENGINE_KEY} begins with a dash, which SGLang reads as a flag; give the engines another key")
    return errors
