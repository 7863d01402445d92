"""Megatron's own checks of the values that it will get, made before anything starts.

Megatron checks its configurations when they are built, in the trainers. Here they are built once for the plan, where a
Megatron flag is passed through. What fusionrl's own flags may say is checked by the plan, and
`tests/checks/test_megatron.py` holds that Megatron agrees.
"""

import importlib.util
import traceback
import warnings
from collections.abc import Callable, Mapping

from fusionrl.base import cpu_wing
from fusionrl.config.config import Config
from fusionrl.models.shape import ModelShape
from fusionrl.plan.trainer_plan import TrainerPlan
from fusionrl.trainer import settings

# Flags that act only with --use-precision-aware-optimizer.
_PRECISION_AWARE = frozenset(
    ("use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
)


def megatron_errors(config: Config, shape: ModelShape, plan: TrainerPlan) -> list[str]:
    """Return a line for each setting that Megatron refuses, with the flag that causes it if it is a single one."""
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
            errors.append(_without_transformer_engine(passed))
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


def _without_transformer_engine(passed: Mapping[str, object]) -> str:
    flags = [_flag(name, value) for name, value in passed.items() if name in _PRECISION_AWARE]
    cure = f"leave {'it' if len(flags) == 1 else 'them'} out (the states stay in fp32)"
    return f"{', '.join(flags)}: the optimizer of lower precision is Transformer Engine's, not installed here; {cure}"


def _without(config: Config, kind: str, name: str) -> Config:
    fields = {key: value for key, value in getattr(config.passthrough, kind).items() if key != name}
    return config.model_copy(update={"passthrough": config.passthrough.model_copy(update={kind: fields})})


def _flag(name: str, value: object) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else "--no-" + flag[2:] if value is False else f"{flag} {value}"
