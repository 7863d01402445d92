"""Checks over several flags and over what they name: all mistakes are found before Ray starts, and listed at once.

Each subject has a file in this room; a function `…_errors` returns messages that name flag, value and cure.
"""

from dataclasses import dataclass

from fusionrl.base.wording import attempt
from fusionrl.checks.adapters import adapter_errors, adapter_folder_errors
from fusionrl.checks.algorithm import algorithm_errors, routing_errors
from fusionrl.checks.data import check_prompts
from fusionrl.checks.effects import effect_errors
from fusionrl.checks.engine_images import engine_image_errors
from fusionrl.checks.evaluation import evaluation_errors, keep_best_errors
from fusionrl.checks.images import image_errors
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
from fusionrl.checks.modes import guest_errors, in_process_errors, missing_flags, mode_errors, place_errors
from fusionrl.checks.outputs import output_errors, template_errors
from fusionrl.checks.rewards import reward_errors, sandbox_of_run
from fusionrl.checks.rollout import rollout_errors, rollout_sampling_errors
from fusionrl.checks.scorers import scorer_errors
from fusionrl.config.config import Config
from fusionrl.config.hooks import check_hook, hook_paths
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.shape import ModelShape
from fusionrl.models.shape_claims import claim_errors


@dataclass(frozen=True)
class Checked:
    """The results of the checks that a plan builds on.

    shape          the model's; None: it could not be read
    num_prompts    of all sets; 0: not known
    quantization   of the model's weights
    data_warnings  odd things about data that can be trained on all the same
    sandbox        the one that this machine gives; None: the run has no use for it
    """

    shape: ModelShape | None
    num_prompts: int
    quantization: BlockFp8 | None = None
    data_warnings: tuple[str, ...] = ()
    sandbox: str | None = None


def validate(config: Config) -> tuple[Checked, list[str]]:
    """Return what the checks read on the way, and every mistake in the configuration."""
    errors: list[str] = place_errors(config)
    if closed := unreadable_errors(config):  # nothing else can be said of them
        return Checked(None, 0), errors + closed
    shape = attempt(errors, lambda: checked_shape(config))
    quantization = attempt(errors, lambda: checked_quantization(config)) if shape else None
    errors += weight_shape_errors(config)
    vocab_size = shape.vocab_size if shape is not None else None
    errors += missing_flags(config) + in_process_errors(config) + guest_errors(config) + reward_errors(config)
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
