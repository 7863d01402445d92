"""The data source of a run, and its state: as it is now, and as it was right after the last rollouts."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fusionrl.buffer.data_source import RolloutDataSourceWithBuffer
from fusionrl.buffer.hook_border import HookBorder
from fusionrl.buffer.stream_saved import SavedStream, blanks
from fusionrl.config.config import Config
from fusionrl.config.hooks import call_hook, load_function, user_code
from fusionrl.config.run_parts import has_own_source
from fusionrl.data.sample import Sample
from fusionrl.observe.json_values import write_atomically

KEPT = 3  # rollouts whose state is kept, for the checkpoint after one of them


class PromptSource:
    """Owns the object of --data-source-path: its cursor, and what a checkpoint holds of it.

    hooked  the object itself, as rollout functions get it; None where the run reads no prompts
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.hooked: Any = None
        self._states: dict[int, dict[str, Any] | None] = {}  # rollout → state right after it
        self._streams: dict[int, SavedStream] = {}  # rollout → what a stream had under way right after it
        self._loaded_stream: SavedStream | None = None  # of the checkpoint from which the run resumes

    def open(self, border: HookBorder) -> None:
        """Make the data source, which reads the prompts; not in runs that need none."""
        data, run = self._config.data, self._config.run
        is_own = has_own_source(self._config)
        if (data.prompt_data is None and not is_own) or run.mode == "eval" or run.load_debug_rollout_data:
            return
        if is_own:
            self.hooked = call_hook("data_source_path", data.data_source_path, border.args())
        else:
            self.hooked = load_function(data.data_source_path)(border.args())
        self.keep(-1)

    def guarded(self) -> AbstractContextManager[None]:
        """Return a block in which what a user's data source raises names it."""
        path = self._config.data.data_source_path
        return user_code(f"--data-source-path {path}", path, only_theirs=True)

    def counts(self) -> dict[str, int]:
        """Return the number of prompts, and of those left out as too long."""
        with self.guarded():
            num_prompts = len(self.hooked) if self.hooked is not None else 0
        return {"num_prompts": num_prompts, "num_too_long": getattr(self.hooked, "num_too_long", 0)}

    def reward_types(self) -> set[object]:
        """Return the `rm_type` of the prompts' metadata; a user's data source may show no prompts."""
        prompts = getattr(self.hooked, "prompts", ())
        return {sample.metadata.get("rm_type") for sample in prompts if isinstance(sample.metadata, dict)}

    def cursor(self) -> dict[str, object]:
        """Return how far the data is read, where the data source says so."""
        return {name: getattr(self.hooked, name, None) for name in ("epoch", "offset")}

    def state(self) -> dict[str, object] | None:
        """Return the state of now; None without a data source."""
        if self.hooked is None:
            return None
        if not hasattr(self.hooked, "state_dict"):
            return {}
        with self.guarded():
            return self.hooked.state_dict()

    def state_hash(self, rollout_id: int | None = None) -> str:
        """SHA-256 of the state of now, or of that right after a rollout: the cursor, and samples that it holds."""
        if rollout_id is None:
            state, stream = self.state(), self._loaded_stream
        else:
            state, stream = self._states.get(rollout_id), self._streams.get(rollout_id)
        saved: object = state if stream is None else [state, stream]
        return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()

    def draw(self, num_groups: int) -> list[list[Sample]]:
        """Return the next groups; fewer where the data have ended."""
        with self.guarded():
            groups: list[list[Sample]] = self.hooked.get_samples(num_groups)
        return groups

    def state_at(self, rollout_id: int) -> dict[str, Any] | None:
        """Return the state of now, for the checkpoint after a rollout; a user's own may keep files of it."""
        if self._keeps_own_state():
            with self.guarded():
                self.hooked.save(rollout_id)
        return self.state()

    def take_in(self, groups: list[list[Sample]]) -> None:
        """Hand groups to the data source: they come first."""
        with self.guarded():
            self.hooked.add_samples(groups)

    def keep(self, rollout_id: int) -> None:
        """Remember the state of now as that right after rollout `rollout_id`."""
        self.keep_with(rollout_id, self.state(), None)

    def keeps(self, rollout_id: int) -> bool:
        return rollout_id in self._states

    def keep_with(self, rollout_id: int, state: dict[str, Any] | None, stream: SavedStream | None) -> None:
        """Remember `state` as that right after a rollout, with what a stream has under way by then."""
        if self.hooked is None:
            return
        self._states[rollout_id] = state
        for old in [key for key in self._states if key <= rollout_id - KEPT]:
            del self._states[old]
        self._streams = {} if stream is None else {rollout_id: stream}  # of the newest alone: it holds answers

    def take_stream(self) -> SavedStream | None:
        """Return what the checkpoint holds of a stream, once."""
        stream, self._loaded_stream = self._loaded_stream, None
        return stream

    def take_back(self) -> None:
        """Without a stream: let the prompts that one had under way at the checkpoint come first."""
        if (stream := self.take_stream()) is not None and (groups := blanks(stream)):
            self.take_in(groups)

    def save(self, path: Path, rollout_id: int) -> None:
        """Write the state as it was right after rollout `rollout_id` to `path` (JSON)."""
        assert self.hooked is None or rollout_id in self._states, f"no state of rollout {rollout_id} is kept"
        state: dict[str, object] = {"rollout_id": rollout_id, "source": self._states.get(rollout_id)}
        if (stream := self._streams.get(rollout_id)) is not None:
            state["stream"] = stream
        elif self._keeps_own_state():
            with self.guarded():
                self.hooked.save(rollout_id)
        write_atomically(path, json.dumps(state))

    def load(self, path: Path) -> int:
        """Resume from a file that `save` wrote; returns its rollout id. ValueError: it does not fit the prompt data."""
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            rollout_id, source, stream = state["rollout_id"], state["source"], state.get("stream")
            if type(rollout_id) is not int:
                raise TypeError(f"rollout_id is {rollout_id!r:.40}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: no state of the Buffer ({error!r:.300}); resume from another one") from error
        if self.hooked is None or source is None:
            return rollout_id
        with self.guarded():
            if self._keeps_own_state():
                self.hooked.load(rollout_id)
            if hasattr(self.hooked, "load_state_dict"):  # last: this is the state right after that rollout
                try:
                    self.hooked.load_state_dict(source)
                except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
                    raise ValueError(
                        f"{path}: it is not a state of this data source ({error!r:.300}); resume from another one"
                    ) from error
        self._states[rollout_id], self._loaded_stream = source, stream
        return rollout_id

    def _keeps_own_state(self) -> bool:
        """Return whether it is a user's with `save` and `load` of its own, as slime's users write it."""
        save = getattr(type(self.hooked), "save", None)
        return save is not None and save is not RolloutDataSourceWithBuffer.save
