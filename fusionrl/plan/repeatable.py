"""Whether a run that is started again with the same flags, on the same machine, gives the same numbers bit by bit.

Engines on a CPU honour the seeds of requests (`rollout/request_seeds.py`). A row of their fp32 products does not depend
on the batch (`cpu/row_products.py`), nor with --bitwise a row in bf16 (`cpu/bitwise.py`). The samples of a rollout are
trained in the order of their indexes. This module finds the other reasons: by the flags, and by what happened.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of, hook_paths
from fusionrl.config.run_parts import evaluates, has_policy_loss, is_streamed, uses_engines
from fusionrl.models.kinds.attention import Full
from fusionrl.models.kinds.base import Kind
from fusionrl.models.kinds.mlp import Dense, Experts
from fusionrl.plan.plan import Plan

_LOGS = ("custom_rollout_log_function_path", "custom_eval_rollout_log_function_path")  # their results are not used
_TRIED: tuple[type[Kind], ...] = (Full, Dense, Experts)
_HAPPENED = {
    "engines_died": "an engine died",
    "requests_retried": "requests were sent again",
    "tokens_kept": "another engine continued answers of one that died",
    "answers_refused": "answers of engines were refused",
    "unused_groups": "which groups were trained depended on which finished first",
    "dropped_surplus": "which groups were trained depended on which finished first",
    "partial_samples": "answers were continued in the next rollout",
    "timed_out": "samples came to --sample-timeout",
    "reward_timeout": "rewards came to their time limit",
    "reward_crash": "a reward function took its process down",
}
"""Name of a metric of rollouts or evaluations that is above 0 → what happened."""
_DROPPED = "groups were dropped, and how many of their tokens count depends on the time"
_HAPPENED_IN_REPLAY = _HAPPENED | {"dropped_surplus": _DROPPED, "dropped_deadline": _DROPPED}


@dataclass(frozen=True)
class Repeatability:
    """`reasons` why a run does not repeat, and the user's `functions` on which it depends, each with its flag."""

    reasons: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line."""
        if self.reasons:
            return f"not repeatable: {'; '.join(self.reasons)}"
        if self.functions:
            return f"repeatable bit by bit if your functions are: {', '.join(self.functions)}"
        return "repeatable: with the same flags this machine gives the same numbers, bit by bit"

    def to_dict(self) -> dict[str, object]:
        """Return what the run's folder holds; `repeatable` is None where it depends on the user's functions."""
        is_repeatable = False if self.reasons else None if self.functions else True
        return {"repeatable": is_repeatable, "reasons": list(self.reasons), "functions": list(self.functions)}


def repeatability(
    config: Config,
    plan: Plan,
    steps: Iterable[Mapping[str, object]] = (),
    *,
    depends_on_batch: bool = False,
    has_external: bool = False,
    outlasts_record: bool = False,
) -> Repeatability:
    """Judge a run by its flags and by the metrics of its `steps`.

    depends_on_batch  products of its engines do
    has_external      engines of others joined it, by the flag or by engines.txt
    outlasts_record   it has more events than the record that it follows
    """
    reasons = [*_by_flags(config, plan), *(_of_engines(config, plan) if uses_engines(config) else ())]
    if has_external and not config.cluster.rollout_external_engine_addrs:
        reasons.append("engines of others joined (engines.txt), which may not honour seeds")
    if depends_on_batch:
        reasons.append("on this processor the last bits of the engines' products depend on the batch")
    if outlasts_record:
        reasons.append("the record of --replay-schedule ended before the run, which then continued freely")
    happened = _HAPPENED_IN_REPLAY if _replays(config) else _HAPPENED
    for step in steps:
        for name, text in happened.items():
            if any(
                isinstance(value := step.get(f"{kind}/{name}"), int | float) and value for kind in ("rollout", "eval")
            ):
                reasons.append(text)
    defaults, values = vars(Config().to_args()), vars(config.to_args())
    paths = [(name, path) for name, path in hook_paths(values) if name not in _LOGS and path != defaults[name]]
    functions = [f"{flag_of(name)} {path}" for name, path in paths]
    functions += [f"--rm-type {name}" for name in ("remote_rm", "code") if name in (config.reward.rm_type or "")]
    return Repeatability(tuple(dict.fromkeys(reasons)), tuple(functions))


def _by_flags(config: Config, plan: Plan) -> Iterable[str]:
    if plan.device == "cuda" and config.run.bitwise:
        yield "--device cuda: no GPU was tried with --bitwise"
    elif plan.device == "cuda":
        yield "--device cuda: kernels add in another order each time"
    if is_streamed(config) and not _replays(config):
        cause = f"--pipeline {config.run.pipeline} generates ahead: which weights sample a token depends on the time"
        yield f"{cause} (--replay-schedule repeats such a run)"


def _replays(config: Config) -> bool:
    return is_streamed(config) and config.pipelining.replay_schedule is not None


def _of_engines(config: Config, plan: Plan) -> Iterable[str]:
    rollout, args = config.rollout, config.passthrough.sglang
    if plan.device == "cuda" and not args.get("enable_deterministic_inference", config.run.bitwise):
        yield "SGLang reads seeds on a GPU only with --sglang-enable-deterministic-inference"
    if plan.device == "cpu" and plan.rollout_dtype != "fp32" and not config.run.bitwise:
        yield f"--rollout-dtype {plan.rollout_dtype}: products of the engines depend on the batch"
    if config.cluster.rollout_external_engine_addrs:
        yield "--rollout-external-engine-addrs: engines of others may not honour seeds"
    if any(each.get("speculative_algorithm") for each in (args, *(group.server_args for group in plan.groups))):
        yield "--sglang-speculative-algorithm: engines that draft read no seeds"
    if plan.lora_push == "adapter":
        yield "engines that add adapters were not tried: --lora-push merged"
    kinds = {type(kind) for kind in (*plan.shape.attention, *plan.shape.mlp)}
    names = sorted(kind.__name__ for kind in kinds if kind not in _TRIED)
    if names or plan.shape.vision is not None:
        yield f"engines of such models were not tried ({', '.join([*names, *(['vision'] * bool(plan.shape.vision))])})"
    if plan.scorers:
        yield "log-probs of a teacher or rewards of a reward model come from engines that were not tried"
    if plan.eval_bundles and evaluates(config):
        yield "--eval-num-gpus: a step's line has the evaluation that has ended by then"
    if rollout.agent_path is not None and has_policy_loss(config):
        yield "--agent-path: turns that an agent asks for at once have their seeds in the order of their coming"
