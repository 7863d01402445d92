"""Seeds of requests: the same in every run, different for everything that a run asks."""

import asyncio
import copy
from argparse import Namespace

from fusionrl.config.config import HookArgs
from fusionrl.data.sample import Sample
from fusionrl.rewards.dispatch import RewardSettings, call_of
from fusionrl.rewards.reward_call import Scorer
from fusionrl.rollout.request_seeds import SEEDED_BY_INDEX, begin_sample, sampling, seeds_in_context


def _args(rollout_id: int | None = 3, seed: int = 42) -> Namespace:
    return Namespace(rollout_seed=seed, rollout_id=rollout_id)


def test_the_same_run_has_the_same_seeds() -> None:
    def seeds() -> list[int]:
        args = _args()
        return [begin_sample(args, index).next(position) for index in range(50) for position in (0, 7)]

    first = seeds()
    assert seeds() == first and len(set(first)) == 100
    assert all(0 <= seed < 2**31 for seed in first)


def test_whatever_differs_has_another_seed() -> None:
    args = _args()
    sample = begin_sample(args, 5)
    again = begin_sample(args, 5)  # begun once more, or of another group with the same index
    seeds = [
        *(sample.next(10), sample.next(10), sample.next(11), again.next(10)),
        begin_sample(_args(rollout_id=4), 5).next(10),
        begin_sample(_args(seed=43), 5).next(10),
        begin_sample(args, 5, evaluation=True).next(10),
        *(begin_sample(args, None).next(10) for _ in range(2)),
        *(begin_sample(args, 5, number).next(10) for number in (1, 2)),  # siblings that share an index
    ]
    assert len(set(seeds)) == len(seeds)


def test_in_a_stream_the_rollout_does_not_matter() -> None:
    """A sample has none until it is trained."""
    args, later = _args(rollout_id=3), _args(rollout_id=4)
    for each in (args, later):
        setattr(each, SEEDED_BY_INDEX, True)
    assert begin_sample(args, 5).next(10) == begin_sample(later, 5).next(10)


def test_the_counts_of_samples_stay_in_the_process_and_are_the_same_in_copies() -> None:
    """They would go to the reward process with every sample, 65,536 entries in a long run."""
    args = HookArgs(rollout_seed=42, rollout_id=3, rm_type=None, custom_rm_path="a.py:f", reward_timeout_s=1.0)
    first = begin_sample(args, 5)
    call = call_of(RewardSettings.of_args(args), Scorer("a.py:f", "", ""), [Sample()], {})
    assert vars(call.args or Namespace()).keys() == vars(args).keys() - {"begun_samples"}
    again = begin_sample(copy.deepcopy(args), 5)
    assert len({first.next(10), again.next(10), begin_sample(args, 5).next(10)}) == 3


def test_the_seeds_of_siblings_follow_one_another() -> None:
    args = _args()
    seeds = [begin_sample(args, 80 + number, number).next(12) for number in range(8)]
    assert seeds == list(range(seeds[0], seeds[0] + 8))


def test_tasks_of_a_sample_have_its_seeds() -> None:
    async def ask() -> int:
        seeds = seeds_in_context()
        assert seeds is not None
        return seeds.next(4)

    async def use() -> list[int]:
        args, made = _args(), []
        for index in (1, 2):
            with sampling(args, index):
                made += [await ask(), await asyncio.create_task(ask())]
        return made

    seeds = asyncio.run(use())
    assert len(set(seeds)) == 4 and asyncio.run(use()) == seeds and seeds_in_context() is None
