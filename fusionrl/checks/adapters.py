"""Checks of adapters: what does not go with them, the folders that they start from, and what the literature advises."""

from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of
from fusionrl.config.run_parts import changes_weights, needs_reference, uses_engines
from fusionrl.models.adapters import ALL_LINEAR, has_stacks
from fusionrl.models.peft_config import read_peft
from fusionrl.models.shape import ModelShape
from fusionrl.plan.adapters import adapter_folders, adapters_of
from fusionrl.plan.critic import auxiliary_role

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
