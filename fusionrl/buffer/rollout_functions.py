"""The user's rollout function and evaluation function, loaded once and called under their flags' names."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from fusionrl.buffer.prompt_source import PromptSource
from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of, user_code
from fusionrl.rollout.miles_inputs import rollout_function
from fusionrl.rollout.types import RolloutAborted

SFT_ROLLOUT = "fusionrl.rollout.sft_rollout.generate_rollout"


class RolloutFunctions:
    """Calls --rollout-function-path and --eval-function-path with `args` and the data source."""

    def __init__(self, config: Config, source: PromptSource) -> None:
        rollout = config.rollout
        default = type(rollout)().rollout_function_path
        self._source, self._default = source, default
        is_sft = config.run.mode == "sft" and rollout.rollout_function_path == default
        self._path = rollout.rollout_function_path
        self._function = rollout_function(SFT_ROLLOUT if is_sft else self._path)
        self._eval_field = "eval_function_path" if rollout.eval_function_path else "rollout_function_path"
        self._eval_path = rollout.eval_function_path or self._path
        self._eval_function = rollout_function(self._eval_path)

    @property
    def where(self) -> str | None:
        """Flag and path of a user's own rollout function; None for the default one."""
        return None if self._path == self._default else f"--rollout-function-path {self._path}"

    def generate(self, args: Namespace, rollout_id: int, data_source: object | None = None) -> object:
        """Call the rollout function; returns what it returned. `data_source`: what stands before the run's own."""
        return self._call("rollout_function_path", self._path, self._function, args, rollout_id, {}, data_source)

    @property
    def asks_again(self) -> bool:
        """Return whether the rollout function may get no prompts, and asks again."""
        return bool(getattr(self._function, "asks_again", False))

    def evaluate(self, args: Namespace, rollout_id: int) -> object:
        """Call the function that evaluates; returns what it returned."""
        keywords = {"evaluation": True}
        return self._call(self._eval_field, self._eval_path, self._eval_function, args, rollout_id, keywords)

    def _call(
        self,
        field: str,
        path: str,
        function: Callable[..., object],
        args: Namespace,
        rollout_id: int,
        keywords: dict[str, bool],
        data_source: object | None = None,
    ) -> object:
        source = self._source
        prompt_source = source.hooked if data_source is None else data_source
        if path == self._default:
            with source.guarded():  # of the user's functions in it, only the data source does not name itself
                return function(args, rollout_id, prompt_source, **keywords)
        with user_code(f"{flag_of(field)} {path}", path, passing=(RolloutAborted,)):
            return function(args, rollout_id, prompt_source, **keywords)
