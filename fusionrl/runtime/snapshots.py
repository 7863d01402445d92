"""Snapshots of the trainers: the state of each rank (`trainer/snapshot.py`) in Ray's object store.

The driver owns them, so they outlive the ranks. On several nodes a holder on another node keeps a copy of each node's.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fusionrl.checks.outputs import snapshot_bytes
from fusionrl.config.config import Config
from fusionrl.plan.plan import Plan
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.supervisor import FAILURES, root_cause
from fusionrl.runtime.trainers import Refs, TrainerGroups
from fusionrl.weights.remote_calls import get

logger = logging.getLogger(__name__)

_TAKEN_S = 60.0  # for ranks to have taken a snapshot: the call was made a step ago


@dataclass(frozen=True)
class Snapshot:
    """The states of all ranks after a rollout; `states`: folder as in a checkpoint → rank of `plan` → reference."""

    rollout_id: int
    plan: Plan
    states: Mapping[str, Refs]
    done: Refs  # of each state that it is there, and of each holder that it has its copies


class Holder:
    """Keeps states of another node's ranks in this node's part of the object store."""

    def __init__(self) -> None:
        self._states = list[object]()

    def hold(self, states: Refs) -> None:
        """Fetch them; those before stay as well, until the next ones show that these are complete."""
        self._states = [*self._states[-1:], ray.get(list(states))]  # views of the store, which keeps them as long


class Snapshots:
    """Takes them, and keeps the newest that is complete."""

    def __init__(self, trainers: TrainerGroups, launcher: Launcher) -> None:
        self._trainers, self._launcher = trainers, launcher
        self._holders: dict[str, ActorHandle] = {}  # node → its holder
        self._pending: Snapshot | None = None
        self.newest: Snapshot | None = None
        self.num_failed = 0
        """How many were not taken since the newest."""

    def lacking(self, config: Config) -> str:
        """Say what snapshots cannot have, "" where nothing; for one, room in each node's object store for the newest
        snapshot and the next one."""
        if config.passthrough.optimizer.get("optimizer_cpu_offload"):
            return "with --optimizer-cpu-offload Megatron has weights of its own on the host"
        groups, bundles = self._trainers, self._launcher.bundles
        if groups.takes_turns_inside:
            return "actor and critic take turns on shared GPUs (a reward model that is trained likewise)"
        ranks = Counter(bundles[place].node_id for name in groups.trained for place in groups.bundles[name])
        stores = {node["NodeID"]: float(node["Resources"].get("object_store_memory", 0)) for node in ray.nodes()}
        num_copies = 4 if len(ranks) > 1 else 2  # the newest and the next one; and likewise for another node
        total = snapshot_bytes(config, groups.plan) * num_copies
        for node, num_ranks in ranks.items():
            needed, room = total * num_ranks / ranks.total(), 0.7 * stores.get(node, 0.0)
            if needed > room:
                has = f"which has {room / 2**30:.1f} GiB for them"
                return f"they need {needed / 2**30:.1f} GiB in the object store that Ray has on a node, {has}"
        return ""

    def begin(self, rollout_id: int) -> None:
        """Begin to take one; does not wait for it."""
        if not self.settle():
            self._holders.clear()  # one may be dead
        groups = self._trainers
        pairs = {n: [t.snapshot.options(num_returns=2).remote() for t in g] for n, g in groups.trained.items()}
        states = {name: [pair[1] for pair in of_group] for name, of_group in pairs.items()}
        taken = [pair[0] for of_group in pairs.values() for pair in of_group]
        self._pending = Snapshot(rollout_id, groups.plan, states, [*taken, *self._copy(states)])

    def stop(self) -> None:
        """Take no more; the newest one stays."""
        self._pending, self._holders = None, {}

    def forget_before(self, rollout_id: int) -> None:
        """Give the store back what an older one has: a checkpoint has a newer state."""
        if self.newest is not None and self.newest.rollout_id < rollout_id:
            self.newest = None

    def settle(self) -> bool:
        """Wait for the last one, which replaces the one before. If a rank or a node has died, that one stays, and
        the answer is False."""
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        try:
            get(pending.done, _TAKEN_S)
        except FAILURES as error:
            logger.warning("the snapshot after step %d was not taken: %s", pending.rollout_id + 1, root_cause(error))
            self.num_failed += 1
            return False
        self.newest, self.num_failed = pending, 0
        return True

    def _copy(self, states: Mapping[str, Refs]) -> Refs:
        """Let the states of each node be copied to the next one; nothing on a single node."""
        by_node: dict[str, list[ray.ObjectRef]] = {}
        for name, of_ranks in states.items():
            for bundle, state in zip(self._trainers.bundles[name], of_ranks, strict=True):
                by_node.setdefault(self._launcher.bundles[bundle].node_id, []).append(state)
        nodes = sorted(by_node) if len(by_node) > 1 else []
        copies = []
        for number, node in enumerate(nodes):
            other = nodes[(number + 1) % len(nodes)]
            if other not in self._holders:
                place = NodeAffinitySchedulingStrategy(other, soft=False)
                options = {"num_cpus": 0, "num_gpus": 0, "max_restarts": 0, "scheduling_strategy": place}
                self._holders[other] = ray.remote(Holder).options(**options).remote()
            copies.append(self._holders[other].hold.remote(by_node[node]))
        return copies
