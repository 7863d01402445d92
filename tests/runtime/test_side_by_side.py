"""A critic, or a process reward model, on devices of its own: both groups of trainers work at once, and learn the same.

The trainers are real, each in a process of its own; what stands in for Ray only carries calls, and notes when each
began and ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.data.train_batch import TrainShard
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.plan import make_plan
from fusionrl.plan.trainer_plan import auxiliary_config
from fusionrl.runtime.trainers import TrainerGroups
from fusionrl.weights.remote_calls import get, put
from tests.trainer.hf_models import make_critic
from tests.trainer.local_ranks import LocalRanks
from tests.trainer.test_prime import PRIME
from tests.trainer.trainer_worker import Samples, config_of

PPO = {"advantage_estimator": "ppo", "critic_num_gpus": 1, "kl_coef": 0.01, "num_critic_only_steps": 1}
REWARDED = {**PRIME, "prm_num_gpus": 1, "kl_loss_coef": 0.1, "use_kl_loss": True}


class Method:
    """A method of a rank in its process, called as Ray calls it."""

    def __init__(self, rank: Rank, name: str) -> None:
        self._rank, self._name, self._num_returns = rank, name, 1

    def options(self, num_returns: int) -> Method:
        self._num_returns = num_returns
        return self

    def remote(self, *args: Any) -> Any:
        self._rank.log.append(f"begin {self._rank.role} {self._name}")
        whole = self._rank.threads.submit(self._run, args)
        if self._num_returns == 1:
            return whole
        return [self._rank.threads.submit(lambda i=i: whole.result()[i]) for i in range(self._num_returns)]

    def _run(self, args: Sequence[Any]) -> Any:
        try:
            return self._rank.pool.call(self._name, *map(_there, args))[0]
        finally:
            self._rank.log.append(f"end {self._rank.role} {self._name}")


def _there(value: Any) -> Any:
    """What a reference stands for, also in a list; a list of one shard is a reference to it."""
    if isinstance(value, list):
        return value[0] if isinstance(value[0], TrainShard) else [_there(one) for one in value]
    return value.result(60) if isinstance(value, Future) else value


class Rank:
    """The only rank of a group of trainers. Its calls come one after the other."""

    def __init__(self, role: str, pool: LocalRanks, log: list[str]) -> None:
        self.role, self.pool, self.log, self.threads = role, pool, log, ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[LocalRanks, LocalRanks]]:
    made = LocalRanks(1), LocalRanks(1)
    yield made
    for pool in made:
        pool.close()


def learn(config: Config, folder: Path, pools: Sequence[LocalRanks], *, is_shared: bool) -> tuple[Any, Any, list[str]]:
    """Two rollouts; `is_shared`: the groups take turns, as on devices that they share.

    Returns metrics of each rollout, hashes of both groups' states, and what began and ended in the last rollout.
    """
    plan = make_plan(config, read_model_shape(folder), device="cpu", num_prompts=8)
    assert plan.auxiliary is not None and not plan.shares_with_auxiliary
    role = plan.auxiliary.role
    if is_shared:
        plan = replace(plan, auxiliary=replace(plan.auxiliary, bundles=plan.trainer_bundles))
    pools[0].start(config, TrainerLayout(1))
    pools[1].start(auxiliary_config(config, role), TrainerLayout(1), role=role)
    log, metrics = list[str](), []
    groups = TrainerGroups(config, plan, lambda refs: [ref.result(120) for ref in refs])
    actors: Any = [Rank("policy", pools[0], log)], [Rank(role, pools[1], log)]
    groups.policy, groups.auxiliaries = actors
    samples = Samples(8, seed=91, share=2)
    for rollout_id in range(2):
        log.clear()
        (shard,) = samples.shards(steps=2)
        index = shard.fields["sample_index"]
        shard.fields |= {"position": index, "group_index": index // 2}
        shards: Any = [shard]
        metrics.append(groups.train(rollout_id, shards, shards))
    return metrics, [pool.call("state_hashes") for pool in pools], log


@pytest.mark.parametrize(
    ("values", "first"), [(PPO, "critic values"), (REWARDED, "prm process_rewards")], ids=["ppo", "prime"]
)
def test_both_work_at_once_and_learn_what_they_learn_in_turn(pools, hf, tmp_path, values, first) -> None:
    folder, _ = hf("llama", True)
    make_critic(tmp_path / "critic", "llama")
    if "critic" in first:
        values = values | {"critic_load": str(tmp_path / "critic")}
    config = config_of(folder, **values, lr=1e-2, rollout_batch_size=4, n_samples_per_prompt=2, num_rollout=2)
    *learnt, apart = learn(config, folder, pools, is_shared=False)
    *learnt_in_turn, shared = learn(config, folder, pools, is_shared=True)
    assert learnt == learnt_in_turn and any(name.startswith("train/") for name in learnt[0][1])
    assert sorted(apart[:2]) == sorted([f"begin {first}", "begin policy score_ahead"]), "both have begun"
    if "critic" in first:
        both = [apart.index(f"{when} {role} train") for when in ("begin", "end") for role in ("policy", "critic")]
        assert max(both[:2]) < min(both[2:])
    waits = [line.split()[0] for line in shared]
    assert waits == ["begin", "end"] * (len(waits) // 2) and not any("score_ahead" in line for line in shared)


def test_groups_that_take_turns_on_gpus_save_and_load_one_after_the_other(tmp_path: Path) -> None:
    """Neither has room while the other has its memory."""
    log = list[str]()

    class Turns:
        def __init__(self, role: str) -> None:
            self.role = role

        def __getattr__(self, method: str) -> Any:
            def remote(*arguments: object) -> Any:
                log.append(f"{method} {self.role}")
                return put(self.role)

            return SimpleNamespace(remote=remote)

    layout = SimpleNamespace(dp=1)
    auxiliary = SimpleNamespace(role="critic", layout=layout)
    plan: Any = SimpleNamespace(device="cuda", shares_with_auxiliary=True, auxiliary=auxiliary, layout=layout)
    groups = TrainerGroups(Config.from_flat({}), plan, get)
    actors: Any = [Turns("policy")], [Turns("critic")]
    groups.policy, groups.auxiliaries = actors
    assert groups.finish("begin_save", tmp_path, 3) == ["policy", "critic"]
    offload = ["offload policy", "offload critic"]
    assert log == [*offload, "begin_save policy", "offload policy", "begin_save critic", "offload critic"]
    plan.shares_with_auxiliary = False
    log.clear()
    assert groups.finish("begin_save", tmp_path, 3) == ["policy", "critic"]
    assert log == ["begin_save policy", "begin_save critic"]
