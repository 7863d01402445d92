"""Flags that were given and do nothing in this run: they act in another mode, or with other flags.

Each flag names its scopes where it is declared (`config.scopes`); a missing one gives a warning, or an error for a
value that only makes sense there.
"""

from fusionrl.config.config import Config
from fusionrl.config.fields import FIELDS, GROUP_OF
from fusionrl.config.groups.base import scopes_of
from fusionrl.config.groups.data import DataGroup
from fusionrl.config.groups.rollout import RolloutGroup
from fusionrl.config.hooks import SIGNATURES, flag_of
from fusionrl.config.run_parts import has_own_rollout
from fusionrl.config.scopes import ENGINES, TRAINERS, TRAINS, Scope
from fusionrl.config.switches import spell

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
