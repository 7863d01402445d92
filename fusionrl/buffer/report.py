"""The report stage: numbers, facts and a few samples of a rollout, for metrics.jsonl, warnings and the console."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from fusionrl.buffer.border import HookBorder
from fusionrl.buffer.rollout_facts import glimpses, rollout_facts
from fusionrl.buffer.rollout_metrics import rollout_metrics, set_metrics
from fusionrl.buffer.scores import Scored
from fusionrl.buffer.staleness import staleness_metrics
from fusionrl.config.config import Config
from fusionrl.config.hooks import call_hook
from fusionrl.observe.advice import Glimpse, RolloutFacts
from fusionrl.rewards.dispatch import take_lost


@dataclass
class Report:
    """See the module. In --mode sft there are no facts and no glimpses."""

    metrics: dict[str, float]
    facts: RolloutFacts | None = None
    glimpses: list[Glimpse] = field(default_factory=list)


def report(
    rollout_id: int,
    scored: Scored,
    own: dict[str, float],
    version: int | None,
    since: float,
    border: HookBorder,
    config: Config,
) -> Report:
    """Report a rollout; a user's function may do it in place of the usual metrics.

    own      the metrics of the rollout function's own; they are kept
    version  of the weights that will train on the samples; None: not known
    since    when the rollout began, by `time.monotonic`
    """
    samples, raw = scored.samples, scored.raw
    if config.run.mode == "sft":
        return Report(own | {"rollout/num_samples": float(len(samples))})
    metrics = dict(own)
    indices = np.array([-1 if s.group_index is None else s.group_index for s in samples])
    usual = rollout_metrics(samples, raw, indices)
    path = config.rollout.custom_rollout_log_function_path
    if path is not None:
        name, seconds = "custom_rollout_log_function_path", time.monotonic() - since
        if call_hook(name, path, rollout_id, border.args(), samples, metrics, seconds):
            usual = {name: usual[name] for name in ("rollout/num_samples", "rollout/num_tokens")}
    metrics |= usual | staleness_metrics(samples, version)
    metrics |= {f"rollout/reward_{reason}": float(count) for reason, count in take_lost().items()}
    if len(config.data.prompt_data or []) > 1:
        metrics |= set_metrics(samples, raw)
    facts = rollout_facts(config, samples, raw, scored.rewards)
    return Report(metrics, facts, glimpses(samples, raw, config.run.log_samples))
