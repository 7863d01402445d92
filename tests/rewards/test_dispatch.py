"""From a sample to its reward: by whom it is scored, and what is said when that goes wrong."""

import argparse
import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusionrl.data.sample import Sample
from fusionrl.rewards.dispatch import (
    RewardError,
    RewardSettings,
    async_rm,
    batched_async_rm,
    call_of,
    counting_lost,
    lost_metrics,
)
from fusionrl.rewards.registry import RM_TYPES
from fusionrl.rewards.reward_call import RewardCall, Scorer
from tests.clock import here_s

HOOKS = """
import asyncio, os
import numpy
async def length(args, sample, **kwargs): return len(sample.response)
def synchronous(args, sample, **kwargs): return 7
async def several(args, sample, **kwargs): return {"right": 1.0, "short": 0.25}
async def raises(args, sample, **kwargs): raise KeyError("answer")
def raises_at_once(args, sample, **kwargs): raise KeyError("answer")
async def hangs(args, sample, **kwargs): await asyncio.sleep(3600)
async def own_timeout(args, sample, **kwargs): raise TimeoutError("the judge did not answer")
async def of_numpy(args, sample, **kwargs): return numpy.float32(0.5)
async def nan(args, sample, **kwargs): return float("nan")
async def text(args, sample, **kwargs): return "good"
def array(args, sample, **kwargs): return numpy.array([1.0, 2.0])
def huge(args, sample, **kwargs): return 10**400
async def ranks(args, samples, **kwargs): return [float(i) for i, _ in enumerate(samples)]
async def too_few(args, samples, **kwargs): return [1.0]
async def raises_for_all(args, samples, **kwargs): raise KeyError("answer")
async def group_hangs(args, samples, **kwargs): await asyncio.sleep(3600)
def dies(args, sample, **kwargs): os._exit(1)
def process(args, sample, **kwargs): return os.getpid() + args.bonus
async def process_later(args, sample, **kwargs): return process(args, sample)
"""


@pytest.fixture
def hooks(tmp_path: Path) -> str:
    path = tmp_path / "reward_hooks.py"
    path.write_text(HOOKS)
    return str(path)


def flags(path: str | None = None, rm_type: str | None = None, **more: Any) -> argparse.Namespace:
    values = {"rm_format_regex": None, "group_rm": False, "reward_key": None}
    values |= {"custom_rm_path": path, "rm_type": rm_type, "reward_timeout_s": 60.0}  # of which the imports take some
    return argparse.Namespace(**(values | more))


def score(args: argparse.Namespace, sample: Sample) -> Any:
    return asyncio.run(async_rm(args, sample))


def score_group(args: argparse.Namespace) -> Any:
    return asyncio.run(batched_async_rm(args, [Sample(index=i, response="x" * i) for i in range(3)]))


@pytest.fixture(autouse=True)
def nothing_is_lost_yet() -> None:
    lost_metrics()


def test_who_scores(hooks: str) -> None:
    sample = Sample(index=5, response="four", label="four")
    assert score(flags(rm_type="exact"), sample) == 1.0
    assert score(flags(f"{hooks}:length"), sample) == 4.0
    assert type(score(flags(f"{hooks}:of_numpy"), sample)) is float
    assert score(flags(f"{hooks}:several"), sample) == {"right": 1.0, "short": 0.25}
    sample.custom_rm_path = f"{hooks}:synchronous"  # a sample's own function goes first
    assert score(flags(f"{hooks}:length"), sample) == 7.0


def test_a_sample_names_its_own_rm_type() -> None:
    sample = Sample(response=r"\boxed{4}", label="4", metadata={"rm_type": "boxed_exact"})
    assert score(flags(rm_type="exact"), sample) == 1.0
    with pytest.raises(RewardError, match=r"--rm-type exakt of the sample's metadata: .*unknown reward.*sample 9"):
        score(flags(rm_type="exact"), Sample(index=9, metadata={"rm_type": "exakt"}))


def test_the_parts_of_a_sum_are_kept_by_the_sample() -> None:
    shared = {"source": "a"}  # by a group, say
    sample = Sample(response="Answer: 4", label="4", metadata=shared)
    args = flags(rm_type="last_number:0.75+format:0.25", rm_format_regex=r"Answer: \d")
    assert score(args, sample) == 1.0
    assert sample.metadata == {"source": "a", "rewards": {"last_number": 1.0, "format": 1.0}}
    assert shared == {"source": "a"}


def test_a_grader_gets_the_metadata() -> None:
    metadata = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert score(flags(rm_type="ifeval"), Sample(response="a; b", metadata=metadata)) == 1.0
    with pytest.raises(RewardError, match="--rm-type ifeval: .*no instruction_id_list.* at sample 2"):
        score(flags(rm_type="ifeval"), Sample(index=2, response="a"))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("raises", "KeyError: 'answer'"),
        ("raises_at_once", "KeyError: 'answer'"),
        ("own_timeout", "the judge did not answer"),
        ("nan", "returned nan"),
        ("text", "returned 'good'"),
        ("array", "returned array([1., 2.])"),
        ("huge", "returned 1000"),
    ],
)
def test_a_reward_that_fails_is_named_or_counted(
    hooks: str, name: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RewardError, match="with --reward-failure-value 0 the run continues") as caught:
        score(flags(f"{hooks}:{name}"), Sample(index=17))
    message = str(caught.value)
    assert f"--custom-rm-path {hooks}:{name}" in message and "sample 17" in message and part in message
    sample = Sample(index=17, status=Sample.Status.COMPLETED)
    assert score(flags(f"{hooks}:{name}", reward_failure_value=-1.0), sample) == -1.0
    assert sample.metadata["reward_lost"] == "error" and sample.status == Sample.Status.COMPLETED
    assert "at sample 17; it gets -1.0 (--reward-failure-value)" in caplog.text
    assert lost_metrics() == {"rollout/reward_error": 1}


@pytest.mark.parametrize("value", ["float('nan')", "None"])
def test_a_dict_whose_reward_is_no_number_is_counted(value: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"def f(args, sample, **kwargs): return {{'score': {value}, 'note': None}}\n")
    path = f"{tmp_path}/mine.py:f"
    assert score(flags(path, reward_failure_value=0.5, reward_key="score"), Sample(index=1)) == 0.5
    assert lost_metrics() == {"rollout/reward_error": 1}
    for more in ({"reward_key": "score"}, {"reward_key": "other", "reward_failure_value": 0.5}):
        assert score(flags(path, **more), Sample(index=1)).keys() == {"score", "note"}, "its reader names it"
    assert lost_metrics() == {}


def test_of_a_group_that_fails_all_samples_are_counted(hooks: str) -> None:
    for name, is_group in (("too_few", True), ("raises_for_all", False)):
        assert score_group(flags(f"{hooks}:{name}", reward_failure_value=0.5, group_rm=is_group)) == [0.5] * 3
    assert lost_metrics() == {"rollout/reward_error": 6}
    with pytest.raises(RewardError, match="has no reward: neither --rm-type nor --custom-rm-path"):
        score(flags(reward_failure_value=0.0), Sample(index=1, response="x"))  # a mistake in the flags is not counted


@pytest.mark.timed
def test_a_reward_that_hangs_or_dies_costs_its_sample(hooks: str, caplog: pytest.LogCaptureFixture) -> None:
    start = time.perf_counter()
    sample = Sample(index=4)
    assert score(flags(f"{hooks}:hangs", reward_timeout_s=0.5, reward_failure_value=-1.0), sample) == -1.0
    assert time.perf_counter() - start < here_s(3)
    assert sample.metadata["reward_lost"] == "timeout"
    assert "no reward after 0.5 s at sample 4; it gets -1.0 (--reward-failure-value)" in caplog.text
    assert sample.status != Sample.Status.FAILED, "it is trained with the value that the flag gives"
    dead = Sample(index=5, status=Sample.Status.COMPLETED)
    assert score(flags(f"{hooks}:dies"), dead) == 0.0
    assert "its process died at sample 5; it is not trained on" in caplog.text
    assert dead.status == Sample.Status.FAILED and dead.metadata["reward_lost"] == "crash"
    assert score_group(flags(f"{hooks}:group_hangs", group_rm=True, reward_timeout_s=0.5)) == [0.0] * 3
    assert (lost_metrics(), lost_metrics()) == ({"rollout/reward_timeout": 4, "rollout/reward_crash": 1}, {})


def test_what_an_evaluation_loses_is_counted_apart(hooks: str) -> None:
    """An evaluation may run beside a rollout, each in a thread of its own."""

    def evaluate() -> dict[str, int]:
        with counting_lost() as lost:
            score(flags(f"{hooks}:dies"), Sample(index=1))
        return dict(lost)

    with ThreadPoolExecutor(2) as threads:
        found = threads.submit(evaluate)
        threads.submit(score, flags(f"{hooks}:dies"), Sample(index=2)).result()
        assert found.result() == {"crash": 1}
    assert lost_metrics() == {"rollout/reward_crash": 1}


def test_groups(hooks: str) -> None:
    for name, is_group in (("length", False), ("ranks", True), ("ranks", False)):  # `ranks` takes `samples`
        assert score_group(flags(f"{hooks}:{name}", group_rm=is_group)) == [0.0, 1.0, 2.0]
    with pytest.raises(RewardError, match=r"of several samples it must return a list of 3 rewards, got \[1.0\]"):
        score_group(flags(f"{hooks}:too_few", group_rm=True))


def test_rewards_in_this_process(hooks: str) -> None:
    """--in-process: the same values and messages as from a process of the pool."""
    for name, in_process in (("process", True), ("process_later", True), ("process", False)):
        reward = score(flags(f"{hooks}:{name}", in_process=in_process, bonus=0.25), Sample())
        assert (reward == os.getpid() + 0.25) == in_process
    assert score(flags(rm_type="exact", in_process=True), Sample(response="four", label="four")) == 1.0
    assert score_group(flags(f"{hooks}:ranks", group_rm=True, in_process=True)) == [0.0, 1.0, 2.0]
    errors: list[Any] = []
    for in_process in (False, True):
        with pytest.raises(RewardError, match="KeyError: 'answer' at sample 7") as caught:
            score(flags(f"{hooks}:raises_at_once", in_process=in_process), Sample(index=7))
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1]) and [error.samples[0].index for error in errors] == [7, 7]
    assert isinstance(errors[1].__cause__.__cause__, KeyError), "where --pdb opens"


def test_the_reward_of_the_docs(tmp_path: Path) -> None:
    page = Path(__file__).parents[2].joinpath("docs/guides/rewards.md").read_text()
    path = tmp_path / "short_reward.py"
    path.write_text(page.split("```python\n")[1].split("```")[0])
    sample = Sample(response="so 4", response_length=250, label="4")
    assert score(flags(f"{path}:reward"), sample) == 0.75
    missing = [name for name in RM_TYPES if f"| `{name}` |" not in page]
    assert not missing, f"docs/guides/rewards.md has no row for {missing}"


# ------------------------------------------------------------------------------------------------ a server's rewards
def test_a_server_scores(json_server: Any) -> None:
    json_server.answers = [(500, "busy"), (200, 0.75)]
    args = flags(rm_type="remote_rm", rm_url=f"{json_server.url}/score")
    assert score(args, Sample(index=1, prompt="p", response="r", label="l")) == 0.75
    assert [body for body, _ in json_server.asked] == [{"prompt": "p", "response": "r", "label": "l"}] * 2
    json_server.answers = [(200, {"quality": 1.0})]
    assert score(args, Sample()) == {"quality": 1.0}
    for answer, message in (
        ((422, "no such field"), r"--rm-type remote_rm of --rm-url .*/score: .*answered 422.* at sample 3"),
        ((200, "good"), "returned 'good'"),
    ):
        json_server.answers = [answer]
        with pytest.raises(RewardError, match=message):
            score(args, Sample(index=3))


def test_a_reward_process_is_sent_what_rewards_need(hooks: str) -> None:
    """The flags go to a user's function, as it has them elsewhere; a built-in reward gets the few that it reads."""
    args = flags(rm_type="exact", prompt_data=["x" * 1000], abort_event=threading.Event(), own=threading.Lock())

    def sent(args: argparse.Namespace, path: str | None) -> RewardCall:
        call = call_of(RewardSettings.of_args(args), Scorer(path, "exact", ""), [Sample()], {})
        return RewardCall.unpacked(call.packed())

    assert sent(args, None).args is None
    for_hook = sent(args, "a.py:f").args
    assert for_hook is not None
    assert vars(for_hook) == {n: v for n, v in vars(args).items() if n not in ("abort_event", "own")}
    for_hook.own, for_hook.rm_type = 1, "changed"  # what a function writes there is not another call's
    for_hook.prompt_data.append("changed")
    for_next = sent(args, "a.py:f").args
    assert for_next is not None
    assert vars(for_next) == {n: v for n, v in vars(args).items() if n not in ("abort_event", "own")}
    args.rm_type = "other"
    for_next = sent(args, "a.py:f").args
    assert for_next is not None
    assert for_next.rm_type == "other"
    assert sent(flags(f"{hooks}:length", rm_format_regex="x+"), None).format_regex == "x+"


def test_hooks_of_a_call_reach_its_process(hooks: str) -> None:
    args = flags(f"{hooks}:length", rollout_sample_hook_path=["a.py:f"])
    call = call_of(RewardSettings.of_args(args), Scorer(None, "exact", ""), [Sample()], {})
    assert call.hooks == {"custom_rm_path": f"{hooks}:length", "rollout_sample_hook_path": ["a.py:f"]}


def test_a_sample_that_nothing_scores_says_so() -> None:
    with pytest.raises(RewardError, match=r"sample 4 has no reward: .* your function has to set sample\.reward"):
        score(flags(), Sample(index=4, response="x"))
