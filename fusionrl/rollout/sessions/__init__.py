"""Agents behind OpenAI- and Anthropic-compatible endpoints: a proxy before the engines records what they ask.

    --custom-generate-function-path fusionrl.rollout.sessions.generate --agent-path my_agent.py:agent

Each sample has a session, with an address and a key of its own. Tokens in, tokens out: the turns of a conversation are
kept as they were sampled, with log-probs and weight versions; what the agent says between them is rendered by the chat
template with mask 0. docs/guides/agents.md has an example.
"""

import asyncio
import contextvars
import functools
import inspect
import threading
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real

from fusionrl.config.hooks import HookError, load_function, user_code
from fusionrl.data.sample import Sample
from fusionrl.rewards.dispatch import RewardSettings, score_sample, takes_a_list
from fusionrl.rollout.generate import SamplingParams
from fusionrl.rollout.sessions.session import CUT, NO_ROOM, Session, open_session

__all__ = ["Session", "generate", "open_session"]
Reward = float | dict[str, object]


async def generate(
    args: Namespace, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample | list[Sample]:
    """One run of the agent of --agent-path in a session of its own; see docs/guides/agents.md.

    One sample, or one for each segment where the agent rewrote its history. All have the agent's reward. Where it
    returns None, the run's reward function scores the last segment, and its reward is that of all; with --group-rm, or
    a reward function that takes `samples`, that function sees all of them. An evaluation gets the last segment alone,
    so that each session counts once. Raises ValueError if there is no --agent-path, or no chat template; HookError if
    the agent raised for another reason than a full context or a cut turn, or returned no reward.
    """
    if args.agent_path is None:
        raise ValueError("fusionrl.rollout.sessions.generate runs your agent: name it with --agent-path")
    agent = Agent("--agent-path", args.agent_path, load_function(args.agent_path))
    return await generate_by(agent, args, sample, sampling_params, evaluation)


@dataclass(frozen=True)
class Agent:
    """An agent's function, and the setting that names it."""

    setting: str
    path: str
    function: Callable[..., object]


async def generate_by(
    agent: Agent, args: Namespace, sample: Sample, sampling_params: SamplingParams, evaluation: bool
) -> Sample | list[Sample]:
    """As `generate`, by an agent that another setting names."""
    reward: Reward | None = None
    error: str | None = None
    async with open_session(args, sample, sampling_params) as session:
        try:
            async with asyncio.timeout(args.agent_timeout_s):
                reward = await _run_agent(agent, args, sample, session)
        except TimeoutError:  # a TimeoutError of the agent's own is a HookError by now
            error = f"the agent took longer than --agent-timeout-s {args.agent_timeout_s:g}"
    if reward is None and not _is_scored(args, sample):
        reward = 0.0  # it was stopped before it gave one
    samples = session.samples(reward, error)
    if evaluation:
        return samples[-1]
    if len(samples) > 1 and reward is None:
        await _share_reward(args, samples)
    return samples[0] if len(samples) == 1 else samples


async def _run_agent(agent: Agent, args: Namespace, sample: Sample, session: Session) -> Reward | None:
    """The agent's reward; None where it gives none, or gave up: the context is full, its client refused a turn that a
    limit cut, or the rollout has ended."""
    where, function = f"{agent.setting} {agent.path}", agent.function
    arguments = (args, sample, session.base_url, session.api_key)
    try:
        with user_code(where, agent.path, sample):
            called = (
                function(*arguments)
                if _is_async(function)
                else await _in_thread(functools.partial(function, *arguments))
            )
            reward = await called if inspect.isawaitable(called) else called
    except HookError as error:
        gave_up = session.lacks_room and _says(error, NO_ROOM)
        gave_up = gave_up or (session.is_cut and any(_says(error, words) for words in CUT))
        if gave_up or session.is_aborted or session.failure is not None:
            return None  # the samples say so, or the failure does
        raise
    if reward is None and not _is_scored(args, sample):
        problem = "it returned None, and nothing else gives a reward: return one, or add --rm-type or --custom-rm-path"
        raise HookError(f"{where}: {problem}", [sample])
    if reward is None or isinstance(reward, dict):
        return reward
    if isinstance(reward, Real):
        return float(reward)
    raise HookError(f"{where}: it returned {reward!r:.80}; a reward (a number or a dict) or None is wanted", [sample])


async def _in_thread(function: Callable[[], object]) -> object:
    """Call a plain function in a thread of its own: its client may block, and each agent of a rollout gets on.

    A pool would have fewer threads than a rollout has agents, and would wait for those that are given up.
    """
    future: Future[object] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # it was given up
            try:
                future.set_result(context.run(function))
            except SystemExit as exit_of_theirs:
                future.set_exception(RuntimeError(f"it called exit({exit_of_theirs.code!r})"))
            except (StopIteration, CancelledError, asyncio.CancelledError) as raised:
                # A future cannot raise the first, and the others would seem to cancel the task that waits.
                future.set_exception(RuntimeError(repr(raised)))
            except Exception as raised:  # whatever an agent raises is raised again by the code that waits for it
                future.set_exception(raised)

    context = contextvars.copy_context()
    threading.Thread(target=run, name="agent", daemon=True).start()
    return await asyncio.wrap_future(future)


def _says(error: BaseException | None, words: str) -> bool:
    """Return whether an error, or one that led to it, has these words."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if words in str(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _is_scored(args: Namespace, sample: Sample) -> bool:
    """Return whether the run gives a reward to a sample that has none."""
    rm_type = sample.custom_rm_path or (sample.metadata or {}).get("rm_type")
    return bool(args.rm_type or args.custom_rm_path or args.use_opd or rm_type)


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _share_reward(args: Namespace, samples: list[Sample]) -> None:
    """Score the last segment, which has the answer, and give its reward to all."""
    settings = RewardSettings.of_args(args)
    if settings.is_group_call or takes_a_list(settings.custom_rm_path):
        return
    last = samples[-1]
    reward = await score_sample(settings, last)
    for item in samples:
        item.reward, item.status = reward, last.status if last.status == Sample.Status.FAILED else item.status
