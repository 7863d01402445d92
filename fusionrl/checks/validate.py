"""Every check of a command line, as lists: what is wrong or odd is found before Ray starts, and reported at once.

Each subject has a file in this room; a function `…_errors` returns messages that name flag, value and cure. Here is the
check that each flag acts in this run: a flag names its scopes where it is declared (`config.scopes`), and a missing one
gives a warning, or an error for a value that only makes sense there.
"""

from dataclasses import dataclass

from fusionrl.base.wording import attempt
from fusionrl.checks import data, images, lengths, model, modes, outputs, rewards, rollout, training
from fusionrl.config.config import FIELDS, Config
from fusionrl.config.hooks import SIGNATURES, check_hook, flag_of, hook_paths
from fusionrl.config.parser import spell
from fusionrl.config.passed_flags import slime_notes
from fusionrl.config.pipeline import staleness_warnings, stream_errors
from fusionrl.config.rollout import DataGroup, RolloutGroup
from fusionrl.config.run_parts import has_own_rollout
from fusionrl.config.scopes import ENGINES, TRAINERS, TRAINS, Scope, scopes_of
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.shape import ModelShape
from fusionrl.models.shape_claims import claim_errors
from fusionrl.plan.plan import Plan
from fusionrl.plan.render import open_file_warnings
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
    errors = modes.place_errors(config)
    if closed := model.unreadable_errors(config):  # nothing else can be said of them
        return Checked(None, 0), errors + closed
    warnings: list[str] = []
    shape = attempt(errors, lambda: model.checked_shape(config))
    quantization = attempt(errors, lambda: model.checked_quantization(config)) if shape else None
    sandbox = attempt(errors, lambda: rewards.sandbox_of_run(config))
    vocab_size = shape.vocab_size if shape is not None else None
    num_prompts = data.check_prompts(config, errors, warnings, vocab_size)
    reward = config.reward
    key = reward.reward_key or ("" if reward.custom_rm_path else None)  # the user's function may return a number
    errors += [
        *model.weight_shape_errors(config),
        *modes.missing_flags(config),
        *modes.in_process_errors(config),
        *modes.guest_errors(config),
        *rm_type_errors("--rm-type", reward.rm_type, reward.rm_model, key, "--reward-key"),
        *rewards.reward_errors(config),
        *rewards.scorer_errors(config, shape),
        *(error for field, path in hook_paths(vars(config.to_args())) if (error := check_hook(field, path))),
        *(images.image_errors(config, shape) + training.adapter_folder_errors(config, shape) if shape else []),
        *rollout.evaluation_errors(config, warnings, vocab_size),
        *lengths.length_errors(config, shape),
        *outputs.template_errors(config),
        *flag_errors(config, shape),
        *rollout.keep_best_errors(config),
        *model.disk_push_errors(config),
        *model.further_layer_errors(config),
        *training.schedule_errors(config),
        *outputs.output_errors(config),
    ]
    return Checked(shape, num_prompts, quantization, tuple(warnings), sandbox), errors


def flag_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """List the mistakes that flags and the model's shape show, of a run here or on a cluster elsewhere."""
    where = f"the config.json of --hf-checkpoint {config.model.hf_checkpoint}"
    return [
        *model.engine_size_errors(config, shape),
        *model.unserved_errors(config, shape),
        *images.engine_image_errors(config, shape),
        *rollout.rollout_errors(config),
        *rewards.source_errors(config),
        *modes.mode_errors(config),
        *stream_errors(config),
        *modes.eval_engine_errors(config),
        *rollout.rollout_sampling_errors(config, None if shape is None else shape.vocab_size),
        *training.adapter_errors(config),
        *training.algorithm_errors(config),
        *training.routing_errors(config, shape),
        *effect_errors(config),
        *([] if shape is None else claim_errors(shape, config.passthrough.slime, where)),
    ]


def elsewhere_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """List the mistakes of a run on a cluster elsewhere, of which nothing but flags and the shape is known."""
    return flag_errors(config, shape) + lengths.flag_length_errors(config, shape)


def flag_warnings(config: Config) -> list[str]:
    """Return a text, with flag and cure, for each setting that is allowed but probably not meant."""
    return [
        *training.algorithm_warnings(config),
        *training.adapter_warnings(config),
        *effect_warnings(config),
        *staleness_warnings(config),
        *training.context_warnings(config),
        *rollout.agent_warnings(config),
        *data.chat_warnings(config),
        *slime_notes(config.passthrough.slime),
    ]


def run_warnings(config: Config, plan: Plan) -> list[str]:
    """Return those of the flags, and those of a run on this machine."""
    return [
        *flag_warnings(config),
        *training.stack_warnings(config, plan.shape),
        *open_file_warnings(config, plan),
        *outputs.disk_warnings(config, plan),
    ]


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
        value = config.value(field)
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
