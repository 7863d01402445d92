"""`fusionrl plan --cluster`: plan for devices that are elsewhere, from a config.json."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fusionrl.base.wording import closest, counted
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import serving_groups
from fusionrl.config.run_parts import estimator_of, uses_trainers
from fusionrl.plan.devices import KINDS, Machine
from fusionrl.plan.trainer_plan import auxiliary_role

_SPEC = re.compile(r"(\d+)x(\d+)x([a-z][\w-]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Cluster:
    """Nodes of the same kind."""

    num_nodes: int
    num_gpus: int  # of a node
    kind: str  # of KINDS

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """The cluster of NODESxGPUSxKIND."""
        match = _SPEC.fullmatch(text.strip())
        if match is None or not (int(match[1]) and int(match[2])):
            raise ValueError(f"--cluster {text}: give NODESxGPUSxKIND, e.g. 8x8xh200")
        kind = match[3].lower()
        if kind not in KINDS:
            close = closest(kind, KINDS)
            hint = f"; did you mean {close}?" if close else ""
            raise ValueError(f"--cluster {text}: no kind {match[3]!r}; known are {', '.join(KINDS)}{hint}")
        return cls(int(match[1]), int(match[2]), kind)

    @property
    def size(self) -> int:
        return self.num_nodes * self.num_gpus

    @property
    def machine(self) -> Machine:
        """One of its nodes; its host memory is not known."""
        return Machine("cuda", self.kind, KINDS[self.kind].memory)

    def describe(self) -> str:
        """It and its devices' figures, with their source."""
        kind = KINDS[self.kind]
        return (
            f"{counted(self.num_nodes, 'node')} x {self.num_gpus} {self.kind}, each {kind.memory / 2**30:.0f} GiB,"
            f" {kind.bandwidth / 1e12:.2f} TB/s, {kind.peak / 1e12:.0f} TFLOP/s in bf16 ({kind.source})"
        )


def on_cluster(config: Config, cluster: Cluster) -> Config:
    """The configuration as it would be on the cluster: what was not given of sizes is worked out from it.

    Trainers get all devices that nothing else asks for; where they are given and the engines are not, engines get the
    rest.
    """
    flags, set_fields = config.cluster, set(config.cluster.model_fields_set)
    if serving_groups(config):  # they say how many
        set_fields.add("rollout_num_gpus")
    for field, size in (("num_gpus_per_node", cluster.num_gpus), ("device", "cuda")):
        value = getattr(flags, field)
        if field in set_fields and value not in (size, "auto"):
            raise ValueError(f"--{field.replace('_', '-')} {value} contradicts --cluster ({size}); leave it out")
    update: dict[str, Any] = {"num_gpus_per_node": cluster.num_gpus, "device": "cuda"}
    has_trainers = {"actor_num_nodes", "actor_num_gpus_per_node"} & set_fields
    shares = flags.colocate or config.run.mode == "sft" or config.run.debug_train_only
    has_engines = "rollout_num_gpus" in set_fields
    left = cluster.size - _num_other_devices(config)
    if not uses_trainers(config):
        update |= {} if has_engines else {"rollout_num_gpus": left}
    elif not has_trainers:
        if not shares and not has_engines:
            raise ValueError(
                f"--cluster: say how its {cluster.size} GPUs are divided: --colocate, or --rollout-num-gpus (the"
                " trainers get the rest), or --actor-num-nodes and --actor-num-gpus-per-node"
            )
        left -= 0 if shares else flags.rollout_num_gpus or 0
        if left < 1:
            raise ValueError(f"--rollout-num-gpus {flags.rollout_num_gpus}: nothing of {cluster.size} GPUs is left")
        whole_nodes = left % cluster.num_gpus == 0
        update["actor_num_nodes"] = left // cluster.num_gpus if whole_nodes else 1
        update["actor_num_gpus_per_node"] = cluster.num_gpus if whole_nodes else left
    elif not shares and not has_engines:
        each = flags.actor_num_gpus_per_node if "actor_num_gpus_per_node" in set_fields else cluster.num_gpus
        left -= flags.actor_num_nodes * each
        update["rollout_num_gpus"] = max(left - left % flags.rollout_num_gpus_per_engine, 1)
        update["actor_num_gpus_per_node"] = each
    elif "actor_num_gpus_per_node" not in set_fields:
        update["actor_num_gpus_per_node"] = cluster.num_gpus
    return config.changed(**update)


def _num_other_devices(config: Config) -> int:
    """Count the devices of evaluation engines, scorers and second trained models that have their own."""
    algorithm, run = config.algorithm, config.run
    count = config.eval.eval_num_gpus
    count += config.reward.rm_num_gpus if config.reward.rm_model is not None and run.mode != "sft" else 0
    if algorithm.use_opd and algorithm.opd_type == "sglang":
        count += algorithm.opd_teacher_num_gpus
    role = auxiliary_role(config)
    if role is not None:
        count += config.value(f"{role}_num_gpus") or 0
    return count


def not_checked(config: Config, unread: Collection[str] = ()) -> list[str]:
    """List what a plan for a cluster elsewhere did not look at. `unread`: roles whose model has no config.json here."""
    unchecked = ["tokenizer", "weights and their quantisation", "prompt data", "rewards", "functions (--…-path)"]
    if config.eval.has_sets:
        unchecked.append("evaluation sets")
    if config.reward.rm_model is not None:
        unchecked.append("reward model" + (" (its own memory)" if "reward-model" in unread else ""))
    if config.algorithm.use_opd:
        unchecked.append("teacher" + (" (its own memory)" if "teacher" in unread else ""))
    if config.model.ref_load is not None:
        unchecked.append("reference model")
    role = estimator_of(config.algorithm).role
    if role is not None and config.value(f"{role}_load") is not None:
        unchecked.append(f"--{role}-load (taken for a model of --hf-checkpoint's shape)")
    return [*unchecked, "host memory, driver, network and disks of the nodes"]


def cluster_errors(cluster: Cluster, num_bundles: int) -> list[str]:
    """Check that a plan fits onto the cluster."""
    if num_bundles <= cluster.size:
        return []
    return [
        f"--cluster {cluster.num_nodes}x{cluster.num_gpus}x{cluster.kind}: the plan takes {num_bundles} devices of"
        f" {cluster.size}; lower --actor-num-nodes, --rollout-num-gpus or those of a critic, reward model or teacher"
    ]
