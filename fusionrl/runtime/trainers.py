"""The trainers of a run: the policy's, and those of a critic or a process reward model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from fusionrl.config.config import Config
from fusionrl.plan.layout import RankCoordinates, TrainerLayout
from fusionrl.plan.plan import Plan
from fusionrl.weights.remote_calls import gather, get

logger = logging.getLogger(__name__)
Refs = Sequence[ray.ObjectRef]


METRICS = """
eval/<set>/loss | nats | Validation loss: mean of -log p over the tokens that would be trained on. | --mode sft
eval/<set>/num_tokens | tokens | Number of these tokens. | --mode sft
"""


def layouts_of(plan: Plan) -> dict[str, TrainerLayout]:
    """Return the layout of each group of trainers by the group's folder in a checkpoint: trainer, critic, prm."""
    layouts = {} if plan.layout is None else {"trainer": plan.layout}
    return layouts if plan.auxiliary is None else {**layouts, plan.auxiliary.role: plan.auxiliary.layout}


def set_up(groups: Sequence[Sequence[ActorHandle]]) -> list[ray.ObjectRef]:
    """Start to set up the trainers of each group, which meet at its rank 0. Return references to their facts.

    Waits for the processes of ranks 0, which import torch: seconds.
    """
    refs = []
    for group in filter(None, groups):
        address, port = get(group[0].node_address.remote())
        refs += [trainer.setup.remote(address, port) for trainer in group]
    return refs


class TrainerGroups:
    """Trainer actors, rank by rank: `policy`, and `auxiliaries` of a critic or prm. Its length: of `policy`.

    Methods call all ranks at once; they end with the slowest, or at the first failure.
    """

    def __init__(self, config: Config, plan: Plan, wait_for: Callable[[Refs], list[Any]]) -> None:
        """`wait_for` waits for ranks that train, and raises at the first failure; the driver's also checks engines and
        stop requests."""
        self.config, self.wait_for = config, wait_for
        self.plan = plan
        """As the trainers are now: without lost devices, of a smaller data-parallel size than the Buffer cuts for."""
        self._num_shards = {name: layout.dp for name, layout in layouts_of(plan).items()}
        self.policy: list[ActorHandle] = []
        self.auxiliaries: list[ActorHandle] = []

    def __len__(self) -> int:
        return len(self.policy)

    def train(self, rollout_id: int, shards: Refs, auxiliary_shards: Refs = ()) -> dict[str, float]:
        """One rollout's optimizer steps on every rank; rank 0's metrics.

        Shard i goes to data-parallel rank i. With several adapters, `shards` has a block of dp shards for each.
        """
        assert self.plan.layout is not None
        auxiliary = self.plan.auxiliary
        policy_shards = self._divided(shards, "trainer", self.plan.layout)
        if auxiliary is None:
            return self.wait_for(
                [t.train.remote(rollout_id, s) for t, s in zip(self.policy, policy_shards, strict=True)]
            )[0]
        theirs = [blocks[0] for blocks in self._divided(auxiliary_shards, auxiliary.role, auxiliary.layout)]
        train = self._train_with_critic if auxiliary.role == "critic" else self._train_with_prm
        return train(rollout_id, policy_shards, theirs, auxiliary.layout)

    def _divided(self, shards: Refs, group: str, layout: TrainerLayout) -> list[list[Refs]]:
        """Rank → for each block of shards (an adapter's, of several) those that it trains: one, unless it takes the
        place of data-parallel ranks that are gone."""
        count = self._num_shards[group]
        share = count // layout.dp
        firsts = [layout.dp_rank(rank) * share for rank in range(layout.world_size)]
        return [[list(shards[i + f : i + f + share]) for i in range(0, len(shards), count)] for f in firsts]

    def sample_columns(self, rollout_id: int) -> list[ray.ObjectRef]:
        """References to what training found out about single samples, a part for each data-parallel rank."""
        layout = self.plan.layout
        assert layout is not None
        last = [layout.rank(RankCoordinates(tp=0, cp=0, dp=dp, pp=layout.pp - 1)) for dp in range(layout.dp)]
        return [self.policy[rank].sample_columns.remote(rollout_id) for rank in last]

    # Between the two groups columns go by reference, of one rank of each replica. On devices of their own both groups
    # work at once, wherever one does not need what the other makes; else one waits for the other.
    def _train_with_prm(
        self, rollout_id: int, policy_shards: Sequence[Sequence[Refs]], theirs: Sequence[Refs], layout: TrainerLayout
    ) -> dict[str, float]:
        """The process reward model learns the outcomes first, and rewards the same rollout then."""
        self.make_room(self.policy)
        calls = [prm.process_rewards.options(num_returns=2) for prm in self.auxiliaries]
        pairs = [call.remote(rollout_id, s) for call, s in zip(calls, theirs, strict=True)]
        rewards = self._of_replicas(pairs, layout, self._score_ahead(rollout_id, policy_shards))
        self.make_room(self.auxiliaries)
        refs = [t.train.remote(rollout_id, s, rewards) for t, s in zip(self.policy, policy_shards, strict=True)]
        metrics: list[dict[str, float]] = self.wait_for([pairs[0][0], *refs])
        return metrics[0] | metrics[1]

    def _train_with_critic(
        self, rollout_id: int, policy_shards: Sequence[Sequence[Refs]], theirs: Sequence[Refs], critic: TrainerLayout
    ) -> dict[str, float]:
        """The critic's values give the advantages and its targets; both learn then."""
        assert self.plan.layout is not None
        self.make_room(self.policy)
        pairs = [c.values.options(num_returns=2).remote(s) for c, s in zip(self.auxiliaries, theirs, strict=True)]
        values = self._of_replicas(pairs, critic, self._score_ahead(rollout_id, policy_shards))
        self.make_room(self.auxiliaries)
        prepare = [trainer.prepare.options(num_returns=2) for trainer in self.policy]
        pairs = [call.remote(rollout_id, s[0], values) for call, s in zip(prepare, policy_shards, strict=True)]
        targets = self._of_replicas(pairs, self.plan.layout)
        refs: list[ray.ObjectRef] = []
        if rollout_id >= self.config.critic.num_critic_only_steps:
            refs = [t.train.remote(rollout_id, s) for t, s in zip(self.policy, policy_shards, strict=True)]
            if self.plan.shares_with_auxiliary:
                self.wait_for(refs)
        self.make_room(self.policy)
        critics = [c.train.remote(rollout_id, s, targets) for c, s in zip(self.auxiliaries, theirs, strict=True)]
        metrics: list[dict[str, float]] = self.wait_for([*refs, *critics])
        self.make_room(self.auxiliaries)
        return (metrics[0] if refs else {}) | metrics[len(refs)]

    def _score_ahead(self, rollout_id: int, policy_shards: Sequence[Sequence[Refs]]) -> Refs:
        """Begin the policy's log-probs, while the other group works on devices of its own: references to wait for."""
        if self.plan.shares_with_auxiliary:
            return []
        return [t.score_ahead.remote(rollout_id, s[0]) for t, s in zip(self.policy, policy_shards, strict=True)]

    def make_room(self, group: list[ActorHandle]) -> None:
        """On GPUs that the actor shares with critic or prm, one gives its memory away before the other works."""
        if self.takes_turns_inside:
            get([trainer.offload.remote(False) for trainer in group])

    @property
    def takes_turns_inside(self) -> bool:
        """Return whether actor and critic (or prm) share GPUs which hold the memory of one of them."""
        is_shared = self.plan.device == "cuda" and self.plan.shares_with_auxiliary
        return is_shared and self.config.cluster.offload_train != "never"

    def finish(self, method: str, *arguments: object, wait: Callable[[Refs], list[Any]] = gather) -> list[Any]:
        """As `call`, and wait for the answers; of groups that take turns on GPUs, one after the other."""
        if not self.takes_turns_inside:
            return wait(self.call(method, *arguments))
        answers = list[Any]()
        for group in self.trained.values():
            self.make_room(group)
        for name, group in self.trained.items():
            answers += wait(self.call(method, *arguments, only=name))
            self.make_room(group)
        return answers

    def validation_losses(self, sets: dict[str, list[ray.ObjectRef]]) -> dict[str, float]:
        """--mode sft: eval/<set>/loss, the mean of -log p over the trained-on tokens, and eval/<set>/num_tokens.

        `sets`: name -> one shard for each data-parallel rank.
        """
        assert self.plan.layout is not None
        values = {}
        for name, shards in sets.items():
            divided = self._divided(shards, "trainer", self.plan.layout)
            refs = [t.evaluate_loss.remote(blocks[0]) for t, blocks in zip(self.policy, divided, strict=True)]
            losses = self.wait_for(refs)[0]
            values[f"eval/{name}/loss"] = losses["eval/loss"]
            values[f"eval/{name}/num_tokens"] = losses["eval/num_tokens"]
        return values

    def offload(self, keep_weights: bool = False) -> None:
        """Let the trainers give their memory away, as --offload-train says; they take it back by themselves."""
        if self.plan.trainers_give_memory:
            get([trainer.offload.remote(keep_weights) for trainer in self.policy])
            get([trainer.offload.remote(False) for trainer in self.auxiliaries])

    def call(self, method: str, *arguments: object, only: str | None = None) -> list[ray.ObjectRef]:
        """Call a method of `ModelRank` on all trainers whose state a checkpoint has: those that this mode trains; on
        the group `only`.

        A path among the arguments becomes that of the trainer's folder in it.
        """
        refs = []
        for name, group in self.trained.items():
            of_group = [str(value / name) if isinstance(value, Path) else value for value in arguments]
            refs += [getattr(trainer, method).remote(*of_group) for trainer in group if only in (None, name)]
        return refs

    @property
    def everyone(self) -> dict[str, list[ActorHandle]]:
        """Folder in a checkpoint → trainers."""
        auxiliary = self.plan.auxiliary
        return {"trainer": self.policy} | ({auxiliary.role: self.auxiliaries} if auxiliary else {})

    @property
    def bundles(self) -> dict[str, tuple[int, ...]]:
        """Folder in a checkpoint → rank → device."""
        auxiliary = self.plan.auxiliary
        return {"trainer": self.plan.trainer_bundles} | ({auxiliary.role: auxiliary.bundles} if auxiliary else {})

    @property
    def trained(self) -> dict[str, list[ActorHandle]]:
        """As `everyone`, in a mode that changes weights."""
        return {} if self.config.run.mode == "reject-sampling" or not self.policy else self.everyone

    def restore(self, plan: Plan, states: Mapping[str, Refs]) -> None:
        """Give every trainer its state out of `states` (folder as in a checkpoint → rank of `plan` → what `snapshot`
        gave)."""
        calls = []
        for name, group in self.trained.items():
            before, now, taken = layouts_of(plan)[name], layouts_of(self.plan)[name], states[name]
            for rank, trainer in enumerate(group):
                own = before.rank(now.coordinates(rank))
                others = [] if before == now else before.with_parameters_of(now.holders(rank))
                calls.append(trainer.restore.remote([taken[own], *(taken[other] for other in others if other != own)]))
        self.wait_for(calls)

    def start(self, check_stop: Callable[[], None] | None = None) -> None:
        """Set up trainers that were made; groups that share devices one after the other, as each gives its memory away
        for the next. `check_stop` is called meanwhile; by default what `wait_for` does."""
        groups = [group for group in (self.policy, self.auxiliaries) if group]
        wait_for = self.wait_for if check_stop is None else partial(gather, check=check_stop)
        if not self.plan.takes_turns:
            wait_for(set_up(groups))
            return
        for number, group in enumerate(groups):
            logger.info("trainers: %s", wait_for(set_up([group]))[0])
            if number + 1 < len(groups):
                self.make_room(group)

    def _of_replicas(self, pairs: Sequence[Refs], layout: TrainerLayout, concurrent: Refs = ()) -> list[object]:
        """Wait for each rank's answer, (metrics, columns), and for `concurrent` calls.

        Returns references to the columns, one of each replica.
        """
        self.wait_for([*concurrent, *(done for done, _ in pairs)])
        return [pairs[layout.ranks_of_dp(dp)[0]][1] for dp in range(layout.dp)]
