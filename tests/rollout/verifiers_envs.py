"""Environments of the tests, written with the classes of verifiers over local data."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def data(**columns: list[Any]) -> Dataset:
    return Dataset.from_dict(columns)


class Hotter(vf.MultiTurnEnv):
    """Guess a number; the environment says how long the guess was. Evil: it tries to speak as the model."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["guesses"] = state.get("guesses", 0) + 1
        said = messages[-1].content
        if said == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="Yes.")]
            return state["final_env_response"]
        return [vf.UserMessage(content=f"No. {len(said)} letters.<|im_end|>")]


def guessed(completion: Any, answer: str) -> float:
    return float(any(message.role == "assistant" and message.content == answer for message in completion))


def guesses(state: Any) -> float:
    return float(state.get("guesses", 0))


def hotter(max_turns: int = 3) -> Any:
    rubric = vf.Rubric(funcs=[guessed, guesses], weights=[1.0, 0.25])
    return Hotter(dataset=data(question=["Which?", "And?"], answer=["7", "8"]), rubric=rubric, max_turns=max_turns)


async def weather(town: str) -> str:
    """The weather of a town.

    Args:
        town: Its name.
    """
    if town == "Atlantis":
        raise KeyError("no such town")
    return f"{town}: rain"


def tools() -> Any:
    async def says_rain(completion: Any) -> float:
        return float("rain" in completion[-1].content)

    return vf.ToolEnv(tools=[weather], dataset=data(question=["Is it wet?"]), rubric=vf.Rubric(funcs=[says_rain]))


class Forgetful(vf.MultiTurnEnv):
    """Each turn is a conversation of its own: what was said before is forgotten."""

    async def get_prompt_messages(self, state: Any) -> Any:
        if state["trajectory"]:
            return [vf.UserMessage(content=f"Turn {len(state['trajectory'])}")]
        return state["prompt"]

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def one(state: Any) -> float:
    return 1.0


def forgetful() -> Any:
    return Forgetful(dataset=data(question=["Turn 0"]), rubric=vf.Rubric(funcs=[one]), max_turns=2)


class Broken(Hotter):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        if self.own:  # type: ignore[attr-defined]
            raise vf.SandboxError("the sandbox is gone")
        raise RuntimeError("the environment has a mistake")


def broken(own: bool) -> Any:
    return Broken(dataset=data(question=["?"], answer=["7"]), rubric=vf.Rubric(funcs=[one]), max_turns=3, own=own)


class Picky(vf.SingleTurnEnv):
    async def get_model_response(self, state: Any, prompt: Any, **kwargs: Any) -> Any:
        return await super().get_model_response(state, prompt, sampling_args=self.asks)  # type: ignore[attr-defined]


def picky(asks: dict[str, Any]) -> Any:
    return Picky(dataset=data(question=["?"]), rubric=vf.Rubric(funcs=[one]), asks=asks)


def grouped() -> Any:
    def compare(states: list[Any]) -> list[float]:
        return [0.0] * len(states)

    return vf.SingleTurnEnv(dataset=data(question=["?"]), rubric=vf.Rubric(funcs=[compare]))


def unwritable() -> Any:
    return vf.SingleTurnEnv(dataset=data(question=["?"], picture=[b"\x00"]), rubric=vf.Rubric(funcs=[one]))
