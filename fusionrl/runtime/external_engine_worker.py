"""The actor process of an engine that others start, and the guests of a run, made from Config and Plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ray
from ray.actor import ActorHandle

from fusionrl.config.config import Config
from fusionrl.engines.external_engine import AttachedEngine, EngineRequirements
from fusionrl.plan.plan import Plan
from fusionrl.runtime.actor_process import ProcessSettings, log_to
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.engine_specs import TORCH_DTYPES, policy_server_args
from fusionrl.runtime.external_engines import ExternalEngines
from fusionrl.runtime.launcher import Launcher

_NEEDED = ("disable_radix_cache", "enable_return_routed_experts", "incremental_streaming_output")
"""Fields of SGLang's that the run sets on its own engines, and without which it gets wrong answers."""
_ALIKE = ("quantization", "context_length", "allow_auto_truncate")
"""Of `fusionrl.config.engine_groups.ALIKE`, those that concern engines of others as well."""


class ExternalEngineWorker(AttachedEngine):
    """An actor that talks to one such engine."""

    def __init__(self, index: int, url: str, api_key: str | None, log: str, settings: ProcessSettings) -> None:
        settings.apply()
        log_to(log, f"external-engine-{index}")
        super().__init__(index, url, 1, api_key)


def make_external_engines(
    config: Config,
    plan: Plan,
    launcher: Launcher,
    engines: EnginePool,
    say: Callable[[str], None],
    on_change: Callable[[], None],
) -> ExternalEngines:
    """Return the guests of a run, none of which has been asked yet."""
    expected: list[EngineRequirements] = []  # read once there is a guest

    def make(index: int, url: str) -> ActorHandle:
        return launcher.make_local(ExternalEngineWorker, f"engine-actor-{index}", index, url)

    def join(actor: ActorHandle) -> ray.ObjectRef:
        if not expected:
            expected.append(engine_requirements(config, plan, launcher.is_alone))
        # Without trainers no push makes the weights equal: then they have to be.
        own_weights = [] if plan.layout is not None else [engines.engines[0].weight_checksums.remote()]
        return actor.join.remote(expected[0], *own_weights)

    return ExternalEngines(
        launcher.run_dir,
        plan.num_engines + len(plan.eval_bundles),
        make,
        join,
        api_key=launcher.api_key,
        pushes=plan.layout is not None,
        say=say,
        on_change=on_change,
    )


def engine_requirements(config: Config, plan: Plan, is_alone: bool) -> EngineRequirements:
    """Return what an engine has to be, to work beside the run's own; `is_alone`: all of the run is on one machine."""
    folder = str(config.model.hf_checkpoint)
    hf_config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    server_args = policy_server_args(config, plan, 0)
    needed = {name: value for name, value in server_args.items() if name in _NEEDED and value}
    # SGLang may write a quantised checkpoint's own method into its arguments.
    alike = {name: server_args.get(name) for name in _ALIKE if name != "quantization" or plan.quantization is None}
    classes = tuple(hf_config.get("architectures") or ())
    return EngineRequirements(
        folder,
        classes,
        plan.shape,
        TORCH_DTYPES[plan.rollout_dtype],
        needed,
        alike,
        wait_s=config.rollout.engine_start_timeout_s,
        by_ipc=plan.transport == "ipc" and plan.device == "cuda",
        only_here=plan.transport == "broadcast" and is_alone,
    )
