"""The user's rollout function and evaluation function, loaded once and called under their flags' names."""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager

from fusionrl.buffer.prompt_source import PromptSource
from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of, user_code
from fusionrl.config.run_parts import DEFAULT_ROLLOUT, has_own_rollout
from fusionrl.rollout.miles_inputs import rollout_function
from fusionrl.rollout.types import RolloutAborted

SFT_ROLLOUT = "fusionrl.rollout.sft_rollout.generate_rollout"


class RolloutFunctions:
    """Calls --rollout-function-path and --eval-function-path with `args` and the data source."""

    def __init__(self, config: Config, source: PromptSource) -> None:
        rollout = config.rollout
        self._source = source
        is_sft = config.run.mode == "sft" and not has_own_rollout(config)
        self._path = rollout.rollout_function_path
        self._function = rollout_function(SFT_ROLLOUT if is_sft else self._path)
        self._eval_field = "eval_function_path" if rollout.eval_function_path else "rollout_function_path"
        self._eval_path = rollout.eval_function_path or self._path
        self._eval_function = rollout_function(self._eval_path)

    @property
    def where(self) -> str | None:
        """Flag and path of a user's own rollout function; None for the default one."""
        return None if self._path == DEFAULT_ROLLOUT else f"--rollout-function-path {self._path}"

    @property
    def keeps_groups(self) -> bool | None:
        """Return whether the rollout function says that it keeps groups between its calls; None: it does not say."""
        return getattr(self._function, "keeps_groups", None)

    def generate(self, args: Namespace, rollout_id: int, data_source: object | None = None) -> object:
        """Call the rollout function; returns what it returned. `data_source`: what stands before the run's own."""
        source = self._source.hooked if data_source is None else data_source
        with self._named("rollout_function_path", self._path):
            return self._function(args, rollout_id, source)

    def evaluate(self, args: Namespace, rollout_id: int) -> object:
        """Call the function that evaluates; returns what it returned."""
        with self._named(self._eval_field, self._eval_path):
            return self._eval_function(args, rollout_id, self._source.hooked, evaluation=True)

    def _named(self, field: str, path: str) -> AbstractContextManager[None]:
        """Return a block in which an error of the user's names its flag and function."""
        if path == DEFAULT_ROLLOUT:  # of the user's functions in it, only the data source does not name itself
            return self._source.guarded()
        return user_code(f"{flag_of(field)} {path}", path, passing=(RolloutAborted,))
