"""Checks of --hf-checkpoint and other folders of weights, of an engine's size, and of values passed to Megatron.

Megatron checks its configurations when trainers build them. The plan builds them as well, if a Megatron flag is
passed through; `tests/checks/test_megatron.py` holds that Megatron agrees with the checks of fusionrl's flags.
"""

import importlib.util
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from fusionrl.base import cpu_wing
from fusionrl.base.wording import attempt, dividing, install_hint
from fusionrl.checks.hub import CHECKPOINTS, TOKENIZERS
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import FLAG, engine_groups
from fusionrl.config.eval_sets import sees_images
from fusionrl.config.hooks import flag_of
from fusionrl.config.run_parts import uses_engines, uses_trainers
from fusionrl.models.families import get_family, kept
from fusionrl.models.hf_folder import INDEX, SINGLE, check_weight_files, is_megatron_folder, weights_folder
from fusionrl.models.quantization import BlockFp8, read_quantization, shape_errors
from fusionrl.models.rules import MTP
from fusionrl.models.shape import ModelShape, read_model_shape
from fusionrl.plan.placement import check_engine_size
from fusionrl.plan.trainer_plan import TrainerPlan, auxiliary_role


def unreadable_errors(config: Config) -> list[str]:
    """List model folders, and files in them, that the user who starts the run may not read."""
    errors = []
    for field in CHECKPOINTS:
        flag, folder = flag_of(field), config.value(field)
        if folder is None or not os.path.isdir(folder):
            continue
        may_enter = os.access(folder, os.R_OK | os.X_OK)
        files = [os.path.join(folder, name) for name in sorted(os.listdir(folder))] if may_enter else []
        # Other checks name a link that leads nowhere; a folder in it is not read.
        closed = [path for path in files if os.path.isfile(path) and not os.access(path, os.R_OK)]
        closed = closed if may_enter else [folder]
        errors += [f"{flag}: {path} may not be read by this user; change its permissions" for path in closed]
    return errors


def checked_shape(config: Config) -> ModelShape:
    """Return the shape of --hf-checkpoint. ValueError: files or folders of the policy are missing or contradict."""
    folder = config.model.hf_checkpoint
    if folder is None:
        raise ValueError("--hf-checkpoint is required: a Hugging Face model folder")
    shape = read_model_shape(folder, sees=sees_images(config))
    if config.train.enable_mtp_training:
        shape = shape.with_mtp(config.train.mtp_num_layers or 1)
    engines = config.run.mode != "sft" and not config.run.debug_train_only
    if config.model.debug_random_weights:
        if config.model.megatron_checkpoint is not None:
            raise ValueError("--debug-random-weights and --megatron-checkpoint exclude each other")
        if engines:
            raise ValueError("--debug-random-weights: engines need real weights; use --mode sft or --debug-train-only")
    elif engines or config.model.megatron_checkpoint is None:
        check_weight_files(folder)
    names = {path.name for path in Path(folder).iterdir()}
    if config.checkpoint.save_hf is not None and kept(shape) is not None and names & {INDEX, SINGLE}:
        try:
            check_weight_files(folder)
        except ValueError as error:
            cure = "fetch them, or take the weights away to save the trained tensors alone"
            raise ValueError(f"--save-hf: what is not trained comes from --hf-checkpoint. {error}; {cure}") from error
    if not names & TOKENIZERS:
        raise ValueError(f"--hf-checkpoint {folder}: it has no tokenizer (tokenizer.json)")
    if config.model.ref_load is not None and not is_megatron_folder(config.model.ref_load):
        reference = read_model_shape(config.model.ref_load, "--ref-load", sees=sees_images(config))
        if reference != shape.trunk:
            raise ValueError(f"--ref-load {config.model.ref_load}: its shape differs from that of --hf-checkpoint")
        check_weight_files(config.model.ref_load, "--ref-load")
    if config.model.megatron_checkpoint is not None:
        weights_folder(config.model.megatron_checkpoint)
    return shape


def checked_quantization(config: Config) -> BlockFp8 | None:
    """Return the quantisation of --hf-checkpoint that trainers push in, or None. ValueError: they cannot."""
    run, folder = config.run, config.model.hf_checkpoint
    if run.mode == "eval" or run.debug_rollout_only or config.reject_sampling.no_trainer:
        return None
    assert folder is not None
    of_engines = config.passthrough.sglang.get("quantization")
    if of_engines is not None:
        flag = f"--sglang-quantization {of_engines}"
        raise ValueError(
            f"{flag}: weights are pushed as --hf-checkpoint has them; leave it out, and give an fp8 folder"
        )
    if config.model.ref_load is not None and not is_megatron_folder(config.model.ref_load):
        read_quantization(config.model.ref_load, "--ref-load")
    return read_quantization(folder)


def engine_size_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """List what is wrong with the number of devices of an engine."""
    try:
        groups = engine_groups(config)
    except ValueError:  # the parser, or the plan, says what is wrong with one
        return []
    named = [(f"{FLAG} {group.name}: per_engine", group.per_engine) for group in groups]
    if all(group.role == "eval" for group in groups):
        named.append(("--rollout-num-gpus-per-engine", config.cluster.rollout_num_gpus_per_engine))
    heads: dict[str, int] = {}
    if shape is not None:
        heads = {name: count for kind in shape.attention for name, count in kind.divided(shape).items()}
        heads.pop("key-value heads", None)  # engines copy them
    per_node = config.cluster.num_gpus_per_node
    return [error for flag, size in named for error in size_errors(flag, size, heads, per_node)]


def unserved_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """List why engines do not serve the model, though trainers train it."""
    if shape is None or not uses_engines(config):
        return []
    unserved = get_family(shape.model_type).unserved
    reason = unserved(shape) if unserved is not None else None
    return [f"--hf-checkpoint {config.model.hf_checkpoint}: {reason}; train it by --mode sft"] if reason else []


def further_layer_errors(config: Config) -> list[str]:
    """List Megatron checkpoints that lack layers of multi-token prediction, where such are trained.

    Megatron-core would find no values for them, after everything has started.
    """
    model, algorithm = config.model, config.algorithm
    teacher = algorithm.opd_teacher_load if algorithm.use_opd and algorithm.opd_type == "megatron" else None
    loads = {"--megatron-checkpoint": model.megatron_checkpoint, "--ref-load": model.ref_load}
    errors = []
    for flag, path in (loads | {"--opd-teacher-load": teacher}).items():
        if path is None or not config.train.enable_mtp_training or not is_megatron_folder(path):
            continue
        try:
            names = (weights_folder(path, flag) / ".metadata").read_bytes()  # a pickle: it is searched, not loaded
        except (OSError, ValueError) as error:
            errors.append(str(error))
            continue
        count = config.train.mtp_num_layers or 1
        if f"{MTP}{count - 1}.".encode() not in names:
            is_start = flag == "--megatron-checkpoint"
            cure = "leave out --enable-mtp-training" if is_start else "give a Hugging Face folder"
            errors.append(f"{flag} {path}: it lacks layer {count - 1} of multi-token prediction; {cure}")
    return errors


def size_errors(flag: str, size: int, heads: Mapping[str, int], per_node: int) -> list[str]:
    """List what is wrong with engines of `size` devices, for a model of so many heads of each name."""
    errors = [
        f"{flag} {size} does not divide the model's {count} {name}; {dividing(count, size)}"
        for name, count in heads.items()
        if count % size
    ]
    attempt(errors, lambda: check_engine_size(flag, size, per_node))
    return errors


def weight_shape_errors(config: Config) -> list[str]:
    """List where a folder's files disagree with its config.json, with tensor, both shapes and file.

    A folder that cannot be read, or that holds a model of no family here, is left out: the check of its flag says so,
    and engines may know more families than the trainers.
    """
    errors = []
    for flag, folder, by_trainers in _folders(config):
        try:
            sees = sees_images(config) and flag in ("--hf-checkpoint", "--ref-load")
            shape = read_model_shape(folder, flag, sees=sees)
            if flag == "--critic-load":
                shape = shape.with_value_head()
            elif flag == "--hf-checkpoint" and by_trainers and config.train.enable_mtp_training:
                shape = shape.with_mtp(config.train.mtp_num_layers or 1)
            quantization = read_quantization(folder, flag) if by_trainers else None
            errors += shape_errors(folder, shape, flag, quantization=quantization, is_loaded=by_trainers)
        except (ValueError, OSError):
            continue
    return errors


def _folders(config: Config) -> list[tuple[str, str, bool]]:
    """Return flag, folder, and whether trainers load it (else engines alone), of each folder that is read."""
    model, algorithm, trainers = config.model, config.algorithm, uses_trainers(config)
    folders: list[tuple[str, str | None, bool]] = []
    if not model.debug_random_weights:
        folders.append(("--hf-checkpoint", model.hf_checkpoint, trainers and model.megatron_checkpoint is None))
    if trainers:
        folders.append(("--ref-load", model.ref_load, True))
        loads = {"critic": config.critic.critic_load, "prm": config.prm.prm_load}
        folders += [(f"--{role}-load", load, True) for role, load in loads.items() if role == auxiliary_role(config)]
    if algorithm.use_opd:
        is_in_trainers = algorithm.opd_type == "megatron"
        folders.append(("--opd-teacher-load", algorithm.opd_teacher_load, is_in_trainers))
    folders.append(("--rm-model", config.reward.rm_model, False))
    return [(flag, folder, by_trainers) for flag, folder, by_trainers in folders if folder is not None]


def disk_push_errors(config: Config) -> list[str]:
    """List what is wrong with the flags of weight pushes by files."""
    weights, errors = config.weights, []
    if weights.update_weight_transport != "disk":
        return []
    is_delta = weights.update_weight_mode == "delta"
    if is_delta and weights.update_weight_local_checkpoint_dir is None:
        errors.append("--update-weight-mode delta needs --update-weight-local-checkpoint-dir: a folder on each host")
    from fusionrl.engines.disk_versions import CHECKSUM_PACKAGES, COMPRESSION_PACKAGE

    kind = weights.update_weight_delta_checksum
    needed = {f"--update-weight-delta-checksum {kind}": CHECKSUM_PACKAGES.get(kind)}
    needed["--update-weight-mode delta"] = COMPRESSION_PACKAGE if is_delta else None
    for flag, package in needed.items():
        if package is not None and importlib.util.find_spec(package) is None:
            errors.append(f"{flag}: the package {package} is not installed; {install_hint(package)}")
    return errors


# Flags that act only with --use-precision-aware-optimizer.
_PRECISION_AWARE = frozenset(
    ("use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
)


def megatron_errors(config: Config, shape: ModelShape, plan: TrainerPlan) -> list[str]:
    """Return a line for each setting that Megatron refuses, with the flag that causes it if it is a single one."""
    from fusionrl.trainer import settings

    cpu_wing.prepare_megatron()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    def transformer(config: Config) -> object:
        fields = settings.transformer_fields(config, shape, plan)
        return settings.transformer_class(fields)(**fields)

    builders: dict[str, Callable[[Config], object]] = {
        "transformer": transformer,
        "optimizer": lambda fields: OptimizerConfig(**settings.optimizer_fields(fields, plan)),
        "ddp": lambda fields: DistributedDataParallelConfig(**settings.ddp_fields(fields)),
    }
    errors = []
    for kind, build in builders.items():
        reason = _refusal(build, config)
        if reason is None:
            continue
        passed = getattr(config.passthrough, kind)
        blamed = [name for name in passed if _refusal(build, _without(config, kind, name)) is None]
        flags = ", ".join(_flag(name, passed[name]) for name in blamed or passed)
        if passed.get("use_precision_aware_optimizer") and importlib.util.find_spec("transformer_engine") is None:
            reduced = [_flag(name, value) for name, value in passed.items() if name in _PRECISION_AWARE]
            cure = f"leave {'it' if len(reduced) == 1 else 'them'} out (the states stay in fp32)"
            reason = "the optimizer of lower precision is Transformer Engine's, not installed here"
            errors.append(f"{', '.join(reduced)}: {reason}; {cure}")
        elif reason.startswith("--"):  # fusionrl's own, which names the flag
            errors.append(reason)
        else:
            errors.append(f"{flags or 'the flags'}: Megatron-core refuses it: {reason}")
    return errors


def _refusal(build: Callable[[Config], object], config: Config) -> str | None:
    """Return Megatron's reason to refuse in one line; None if it does not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            build(config)
    except Exception as error:  # Megatron compares what it is given with anything: a wrong type fails in any way
        text = " ".join(str(error).split())
        if not text:  # an assert without words: its line says what was wanted
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = frame.line or type(error).__name__
        return text[:400]
    return None


def _without(config: Config, kind: str, name: str) -> Config:
    passed = getattr(config.passthrough, kind)
    return config.changed(**{kind: {key: value for key, value in passed.items() if key != name}})


def _flag(name: str, value: object) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else "--no-" + flag[2:] if value is False else f"{flag} {value}"
