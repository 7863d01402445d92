"""Checks of the algorithm's flags and of adapters."""

from fusionrl.algorithms.estimators import names_where, readers_of
from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of
from fusionrl.config.run_parts import (
    changes_weights,
    estimator_of,
    has_own_rollout,
    has_policy_loss,
    needs_reference,
    uses_engines,
)
from fusionrl.models.peft import read_peft
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import ALL_LINEAR, has_stacks
from fusionrl.plan.trained_parts import adapter_folders, adapters_of
from fusionrl.plan.trainer_plan import auxiliary_role

# Estimators that measure a sample against its siblings alone: a single sample gets 0.
OF_GROUPS = names_where(lambda estimator: estimator.compares_siblings and estimator.role is None)


def algorithm_errors(config: Config) -> list[str]:
    """Messages with flag, value and cure."""
    a, reward, samples, errors = config.algorithm, config.reward, config.rollout.n_samples_per_prompt, []
    if (a.loss_type == "custom_loss") != (a.custom_loss_function_path is not None):
        errors.append("--loss-type custom_loss and --custom-loss-function-path go together; give both")
    if a.loss_type == "custom_loss" and config.run.mode != "rl":
        errors.append(f"--loss-type custom_loss belongs to --mode rl, not to {config.run.mode}")
    if a.advantage_estimator in readers_of("pass_k"):
        if a.pass_k > samples:
            errors.append(f"--pass-k {a.pass_k} is over --n-samples-per-prompt {samples}; lower it")
        if reward.length_penalty_coef or reward.overlong_buffer_len:
            cure = "leave out --length-penalty-coef and --overlong-buffer-len"
            errors.append(f"--advantage-estimator {a.advantage_estimator} counts right and wrong answers; {cure}")
    if a.loss_aggregation == "constant" and a.loss_length is None and config.rollout.rollout_max_response_len is None:
        errors.append("--loss-aggregation constant needs --loss-length or --rollout-max-response-len")
    if a.custom_policy_loss_path is not None and a.policy_loss != "auto":
        errors.append(f"--policy-loss {a.policy_loss} and --custom-policy-loss-path exclude each other; leave one out")
    return errors + (_dpo_errors(config) if a.policy_loss == "dpo" else []) + _correction_errors(config)


def _dpo_errors(config: Config) -> list[str]:
    a, samples = config.algorithm, config.rollout.n_samples_per_prompt
    conflicts = {
        f"--advantage-estimator {a.advantage_estimator}": estimator_of(a).role == "prm",
        f"--loss-aggregation {a.loss_aggregation}": a.loss_aggregation != "auto",
        "--use-opd": a.use_opd,
        "--normalize-advantages": a.normalize_advantages,
        "--custom-advantage-function-path": config.train.custom_advantage_function_path,
        f"--loss-type {a.loss_type}": a.loss_type != "policy_loss",
    }
    errors = [f"{flag}: --policy-loss dpo has no use for it; leave one out" for flag, on in conflicts.items() if on]
    if samples < 2:
        errors.append(f"--policy-loss dpo compares answers to one prompt; raise --n-samples-per-prompt {samples}")
    return errors


def schedule_errors(config: Config) -> list[str]:
    """List what is wrong with the learning rate's schedule, and switches that cannot be off."""
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


def algorithm_warnings(config: Config) -> list[str]:
    """Return a line for each setting that is allowed but probably not meant."""
    a, rollout, reward, warnings = config.algorithm, config.rollout, config.reward, []
    if config.run.mode == "rl" and a.use_kl_loss and not a.kl_loss_coef and a.loss_type == "policy_loss":
        warnings.append("--use-kl-loss without --kl-loss-coef: train/kl_loss is only measured; give the coefficient")
    may_be_otherwise = (  # a function in one of these may make groups, rewards or advantages itself
        a.use_opd or a.disable_rewards_normalization or a.loss_type != "policy_loss",
        has_own_rollout(config),
        rollout.custom_generate_function_path,
        reward.custom_reward_post_process_path,
        reward.custom_convert_samples_to_train_data_path,
        config.train.custom_advantage_function_path,
        config.train.rollout_data_postprocess_path,
    )
    alone = config.run.mode == "rl" and rollout.n_samples_per_prompt == 1 and a.advantage_estimator in OF_GROUPS
    if alone and not any(may_be_otherwise):
        warnings.append(
            f"--n-samples-per-prompt 1 with --advantage-estimator {a.advantage_estimator}: an answer alone has the"
            " advantage 0; sample at least 2, or take reinforce_plus_plus, remax or ppo"
        )
    return warnings


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


def _correction_errors(config: Config) -> list[str]:
    a, errors = config.algorithm, []
    if not a.tis_clip_low < a.tis_clip:
        errors.append(f"--tis-clip-low {a.tis_clip_low} must be below --tis-clip {a.tis_clip}")
    if not a.rejection_low < a.rejection_high:
        errors.append(f"--rejection-low {a.rejection_low} must be below --rejection-high {a.rejection_high}")
    corrects = a.use_tis or a.rejection_level is not None or a.tis_veto is not None
    if corrects and a.use_rollout_logprobs:
        errors.append("--use-rollout-logprobs excludes --use-tis, --rejection-level and --tis-veto; leave one out")
    if a.custom_tis_function_path is not None and (a.rejection_level is not None or a.tis_veto is not None):
        errors.append("--custom-tis-function-path replaces --rejection-level and --tis-veto; leave one out")
    return errors


def routing_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """Messages on routing replay, for a model of `shape` (None: not known)."""
    a, errors = config.algorithm, []
    engine = a.use_rollout_routing_replay
    if not (engine or a.use_routing_replay):
        return []
    flag = "--use-rollout-routing-replay" if engine else "--use-routing-replay"
    if shape is not None and not shape.num_experts:
        errors.append(f"{flag}: the model of --hf-checkpoint has no experts to route to; leave the flag out")
    passed = config.passthrough.transformer
    for name, value in (("moe_router_fusion", True), ("overlap_moe_expert_parallel_comm", True)):
        if passed.get(name) == value:
            errors.append(f"{flag}: --{name.replace('_', '-')} leaves no place for it; leave one out")
    if "sinkhorn" in passed.get("moe_router_load_balancing_type", ""):
        errors.append(f"{flag}: --moe-router-load-balancing-type sinkhorn chooses by all tokens; leave one out")
    if passed.get("cuda_graph_impl", "none") != "none":
        errors.append(f"{flag}: a CUDA graph (--cuda-graph-impl) keeps the choice it was made with; leave one out")
    return errors


LEAST_LR = 5e-5
# Of TransformerConfig: layers are then not called as modules, or not one after the other; or hold their weights in fp8.
_BYPASSING = (
    *("tp_comm_overlap", "moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    *("use_transformer_engine_op_fuser", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "fp8", "fp4"),
)
# These move the router's bias, or weights, without a gradient.
_MOVING = ("moe_router_bias_update_rate", "qk_clip")
_FREEZING = ("freeze_params_name_list", "only_train_params_name_list", "freeze_vision")
_OF_MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "linear_fc1", "linear_fc2")


def adapter_errors(config: Config) -> list[str]:
    """List what does not go with adapters, a line each."""
    rank = config.lora.lora_rank
    if not rank:
        return []
    conflicts = [*_conflicts(config), *(_conflicts_of_several(config) if len(adapter_folders(config)) > 1 else [])]
    errors = [
        f"{flag} with --lora-rank {rank}: {reason}; leave one out" for applies, flag, reason in conflicts if applies
    ]
    if uses_engines(config) and not changes_weights(config):
        for name in (name for name, folder in adapter_folders(config).items() if folder is None):
            cure = f"--lora-adapters {name}=FOLDER" if config.lora.lora_adapters else "--lora-adapter-path"
            errors.append(f"--lora-rank {rank}: nothing is trained, and no folder has the adapter {name}; give {cure}")
    reference = config.model.ref_load
    if reference not in (None, config.model.hf_checkpoint) and needs_reference(config.algorithm):
        cure = "leave it out, or give the folder as --hf-checkpoint too"
        errors.append(f"--ref-load {reference}: the reference of adapters is the model without them; {cure}")
    return errors


def _conflicts(config: Config) -> list[tuple[object, str, str]]:
    """Return (whether it is so, flag, reason)."""
    train, passed, weights = config.train, config.passthrough.transformer, config.weights
    bypassed = "layers are then not called one by one, with their adapters"
    frozen = "adapters alone are trained; --target-modules chooses them"
    return [
        *((passed.get(name) not in (None, False, "none"), flag_of(name), bypassed) for name in _BYPASSING),
        *((passed.get(name), flag_of(name), "it changes weights that engines get once") for name in _MOVING),
        *((getattr(train, name), flag_of(name), frozen) for name in _FREEZING),
        (train.enable_mtp_training, "--enable-mtp-training", "layers of multi-token prediction have no adapters"),
        (
            weights.update_weight_transport == "disk"
            and weights.update_weight_mode == "delta"
            and config.lora.lora_push != "merged",
            "--update-weight-mode delta",
            "an adapter travels whole (--lora-push merged sends deltas of weights)",
        ),
        (
            config.lora.lora_adapters and config.lora.lora_adapter_path,
            "--lora-adapter-path",
            "--lora-adapters names a folder for each adapter: NAME=FOLDER",
        ),
    ]


def _conflicts_of_several(config: Config) -> list[tuple[object, str, str]]:
    role, passed = auxiliary_role(config), config.passthrough.optimizer
    offloads = passed.get("optimizer_cpu_offload")
    return [
        (role, f"--advantage-estimator {config.algorithm.advantage_estimator}", f"one {role} would score all adapters"),
        (offloads, "--optimizer-cpu-offload", "the optimizers of several adapters take turns on the device"),
    ]


def adapter_folder_errors(config: Config, shape: ModelShape) -> list[str]:
    """List what is wrong with the PEFT folders that adapters start from."""
    errors = []
    several = bool(config.lora.lora_adapters)
    for name, folder in adapter_folders(config).items():
        flag = f"--lora-adapters {name}" if several else "--lora-adapter-path"
        try:
            if folder is not None and (spec := adapters_of(config, shape)) is not None:
                read_peft(folder, shape, flag).check(spec)
        except ValueError as error:
            errors.append(str(error))
    return errors


def adapter_warnings(config: Config) -> list[str]:
    """Return a line for what the literature advises against ("LoRA Without Regret", docs/guides/adapters.md)."""
    lora, warnings = config.lora, []
    if not lora.lora_rank or not changes_weights(config):
        return []
    if config.train.lr < LEAST_LR:
        warnings.append(
            f"--lr {config.train.lr:g} with --lora-rank: adapters learn best at about ten times the rate of full"
            f" training; give --lr {LEAST_LR:g} or more"
        )
    has_all = ALL_LINEAR in lora.target_modules
    if not (has_all or set(_OF_MLP) & set(lora.target_modules)) or set(_OF_MLP[-2:]) <= set(lora.exclude_modules):
        warnings.append(
            f"--target-modules {' '.join(lora.target_modules)}: adapters on attention alone learn less than those on"
            " MLPs, even with as many parameters; give all-linear"
        )
    return warnings


def stack_warnings(config: Config, shape: ModelShape) -> list[str]:
    """Return a line where `all-linear` leaves out the experts."""
    if not config.lora.lora_rank or ALL_LINEAR not in config.lora.target_modules or not has_stacks(shape):
        return []
    reason = "get no adapters, as one tensor has the weights of all of them"
    return [f"--target-modules all-linear: the experts of {shape.model_type} {reason}"]
