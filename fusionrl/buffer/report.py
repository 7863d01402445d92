"""The report stage: numbers, facts and a few samples of a rollout, for metrics.jsonl, warnings and the console."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fusionrl.buffer.border import HookBorder
from fusionrl.buffer.rollout_facts import glimpses, rollout_facts
from fusionrl.buffer.rollout_metrics import rollout_metrics, set_metrics
from fusionrl.buffer.scores import Scored
from fusionrl.buffer.tokens import token_numbers
from fusionrl.config.config import Config
from fusionrl.observe.advice import Glimpse, RolloutFacts
from fusionrl.rewards.dispatch import take_lost


@dataclass
class Report:
    """What is told of a rollout. In --mode sft there are no facts and no glimpses.

    version  of the weights that will train on the samples; None: no token has a known version
    """

    metrics: dict[str, float]
    version: int | None = None
    facts: RolloutFacts | None = None
    glimpses: list[Glimpse] = field(default_factory=list)


def report(
    rollout_id: int,
    scored: Scored,
    metrics: dict[str, float],
    pushed_version: int | None,
    since: float,
    config: Config,
    border: HookBorder,
) -> Report:
    """Report a rollout; a user's function may do it in place of the usual metrics.

    metrics         those of the rollout function's own; they are kept
    pushed_version  as `training_version` takes it
    since           when the rollout began, by `time.monotonic`
    """
    samples = scored.samples
    raw = scored.raw
    if config.run.mode == "sft":
        return Report(metrics | {"rollout/num_samples": float(len(samples))})
    usual = rollout_metrics(samples, raw)
    sets = set_metrics(samples, raw) if len(config.data.prompt_data or []) > 1 else {}
    tokens = token_numbers(samples, pushed_version)
    log = border.hook("custom_rollout_log_function_path")
    if log is None or not log(rollout_id, border.args(), samples, metrics, time.monotonic() - since):
        metrics |= usual | tokens.distance
    else:
        metrics |= {name: usual[name] for name in ("rollout/num_samples", "rollout/num_tokens")}
    metrics |= sets | tokens.staleness
    metrics |= {f"rollout/reward_{reason}": float(count) for reason, count in take_lost().items()}
    shown = glimpses(samples, raw, config.run.log_samples)
    return Report(metrics, tokens.version, rollout_facts(config, samples, raw, scored.rewards), shown)
