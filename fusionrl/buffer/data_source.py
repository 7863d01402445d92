"""Data sources: where prompts come from. `--data-source-path` names a class of a user's own with these methods.

`PromptSource` owns the run's: its state as it is now, and as it was right after the last rollouts.
"""

from __future__ import annotations

import copy
import hashlib
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fusionrl.config.config import Config
from fusionrl.config.hooks import call_hook, load_function, user_code
from fusionrl.config.run_parts import has_own_source, reads_prompts
from fusionrl.data.columns import PromptColumns
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageRef
from fusionrl.data.prompts import Mixture, PromptSequence, load_conversations, load_prompts
from fusionrl.data.rows import parse_sets
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import images_of
from fusionrl.data.sample_json import SetState, SourceState, images_in, pack, pack_sample, unpack, unpack_sample
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.observe.formats import write_atomically

if TYPE_CHECKING:  # users' hooks import this module too, and would wait for these imports
    from fusionrl.buffer.collect import HookBorder
    from fusionrl.buffer.stream_state import SavedStream


class RolloutDataSourceWithBuffer:
    """Prompts of one or several sets, epoch after epoch, and a buffer of groups that were handed back.

    The buffer is served first, oldest first or as --buffer-filter-path chooses. The order of the prompts follows from
    the seed and how many were drawn of each set (`fusionrl.data.prompts`), so these numbers, the buffer and
    `metadata` are all that a checkpoint needs. A class derived from this one that holds more adds it to `state_dict`
    and `load_state_dict`; or, as with slime, to `save` and `load`, which are then called at each checkpoint.

    Without --prompt-data its groups are empty samples, for a rollout function that finds its prompts elsewhere.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.prompts: list[Sample] = []
        self.buffer: list[list[Sample]] = []
        self.metadata: dict[str, Any] = {}
        self.num_groups = 0
        self.num_samples = 0
        self.num_too_long = 0
        specs = [args.prompt_data] if isinstance(args.prompt_data, str) else list(args.prompt_data or [])
        self._names: list[str] = []
        self._fingerprints: list[str] = []
        sequences: list[PromptSequence] = []
        for position, (spec, prompt_set) in enumerate(zip(specs, parse_sets(specs), strict=True)):
            prompts = self._load(spec)
            if len(specs) > 1 or prompt_set.given_name is not None:
                for sample in prompts:
                    sample.metadata.setdefault("data_source", prompt_set.name)
            self._names.append(prompt_set.name)
            self._fingerprints.append(_fingerprint(prompts))
            self.prompts += prompts
            sequences.append(PromptSequence(prompts, (args.rollout_seed, position) if args.rollout_shuffle else None))
        if not specs:
            self._names, self._fingerprints = ["none"], [""]
            sequences.append(PromptSequence([Sample()], None))
        self._mixture = Mixture(sequences, args.prompt_data_weights or None)

    def _load(self, spec: str) -> list[Sample]:
        args = self.args
        keeps_messages = reads_prompts(args.rollout_function_path, args.custom_generate_function_path)
        columns = PromptColumns.of(args, keeps_messages)
        if args.mode == "sft":
            return load_conversations(spec, columns).samples
        loaded = load_prompts(spec, load_tokenizer(args.hf_checkpoint), columns)
        self.num_too_long += loaded.num_too_long
        return loaded.samples

    def __len__(self) -> int:
        """Number of prompts of all sets."""
        return len(self.prompts)

    @property
    def num_drawn(self) -> dict[str, int]:
        """Prompts drawn of each set so far, over all epochs."""
        drawn = [sequence.num_drawn for sequence in self._mixture.sequences]
        return dict(zip(self._names, drawn, strict=True))

    @property
    def epoch(self) -> int:
        """As many prompts were drawn as all sets together have, so many times."""
        return sum(self.num_drawn.values()) // max(1, len(self))

    @property
    def offset(self) -> int:
        """Prompts drawn in this epoch."""
        return sum(self.num_drawn.values()) % max(1, len(self))

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next `num_samples` groups: of the buffer, then of --n-samples-per-prompt copies of a prompt each."""
        groups = self._from_buffer(num_samples)
        return groups + [self._group(self._mixture.draw()) for _ in range(num_samples - len(groups))]

    def _from_buffer(self, num_samples: int) -> list[list[Sample]]:
        if not self.buffer or num_samples <= 0:
            return []
        if self.args.buffer_filter_path is None:
            groups, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
            return groups
        # slime's data source does not know the rollout either, and passes None.
        path = self.args.buffer_filter_path
        groups = call_hook("buffer_filter_path", path, self.args, None, self.buffer, num_samples)
        flag = f"--buffer-filter-path {path}"
        _check_groups(groups, f"{flag}: it returned")
        if len(groups) > num_samples:
            raise ValueError(f"{flag}: it returned {len(groups)} groups, but at most {num_samples} were requested")
        taken = {id(group) for group in groups}
        if len(taken) < len(groups):
            raise ValueError(f"{flag}: it returned a group twice")
        self.buffer[:] = [group for group in self.buffer if id(group) not in taken]  # where the hook left them in
        return list(groups)

    def _group(self, prompt: Sample) -> list[Sample]:
        group = []
        for _ in range(1 if self.args.mode == "sft" else self.args.n_samples_per_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index, sample.index = self.num_groups, self.num_samples
            self.num_samples += 1
            group.append(sample)
        self.num_groups += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Hand groups back, partial ones too."""
        _check_groups(samples, "data_source.add_samples got")
        self.buffer.extend(samples)

    def get_buffer_length(self) -> int:
        """Number of groups that were handed back."""
        return len(self.buffer)

    def update_metadata(self, metadata: Mapping[str, object]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, object]:
        return self.metadata

    # -------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> SourceState:
        """Cursor, counters, metadata and the buffer, as values for JSON; restored bit by bit, arrays too."""
        return {
            "sets": self._sets_state(),
            "num_groups": self.num_groups,
            "num_samples": self.num_samples,
            "metadata": pack(self.metadata),
            "buffer": [[pack_sample(sample) for sample in group] for group in self.buffer],
        }

    def _sets_state(self) -> list[SetState]:
        sets = zip(self._names, self._mixture.sequences, self._mixture.shares, self._fingerprints, strict=True)
        return [
            {
                "name": name,
                "num_drawn": sequence.num_drawn,
                "num_prompts": len(sequence.prompts),
                "fingerprint": fingerprint,
                "share": str(share),
            }
            for name, sequence, share, fingerprint in sets
        ]

    def load_state_dict(self, state: SourceState) -> None:
        """Go on where `state` was taken; ValueError if the prompt data then had other sets, weights or rows."""
        current_sets = self._sets_state()
        if len(current_sets) != len(state["sets"]):
            raise ValueError(
                f"--prompt-data has {len(current_sets)} sets now, but had {len(state['sets'])} when the checkpoint was"
                " saved; a resume needs the same ones"
            )
        for now, then in zip(current_sets, state["sets"], strict=True):
            if (now["num_prompts"], now["fingerprint"]) != (then["num_prompts"], then["fingerprint"]):
                raise ValueError(
                    f"--prompt-data {now['name']}: its {now['num_prompts']} prompts are not the"
                    f" {then['num_prompts']} of the checkpoint; a resume needs the same file and flags of the data"
                )
        shares = [set_state["share"] for set_state in state["sets"]]
        if [set_state["share"] for set_state in current_sets] != shares:
            raise ValueError(
                "--prompt-data-weights: they are not those of when the checkpoint was saved"
                f" ({', '.join(shares)}); a resume needs the same ones"
            )
        counters = [state["num_groups"], state["num_samples"], *(set_state["num_drawn"] for set_state in state["sets"])]
        if any(type(count) is not int or count < 0 for count in counters):
            raise ValueError("the data cursor in the checkpoint is not a whole number; resume from another one")
        for sequence, then in zip(self._mixture.sequences, state["sets"], strict=True):
            sequence.num_drawn = then["num_drawn"]
        self.num_groups, self.num_samples = state["num_groups"], state["num_samples"]
        try:
            self.metadata = dict(unpack(state["metadata"]))
            self.buffer = [[unpack_sample(sample) for sample in group] for group in state["buffer"]]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"what the checkpoint's data cursor holds cannot be read ({error!r:.300}); resume from another one"
            ) from error

    def save(self, rollout_id: int) -> None:
        """Write the state of now to a file of its own under `args.save`."""
        path = self._state_file(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(self.state_dict()))

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from the file of `save`, if there is one under `args.load` or, without it, `args.save`."""
        folder = self.args.load or self.args.save
        if rollout_id is not None and folder and (path := self._state_file(folder, rollout_id)).is_file():
            self.load_state_dict(json.loads(path.read_text(encoding="utf-8")))

    @staticmethod
    def _state_file(folder: str, rollout_id: int) -> Path:
        return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"


RolloutDataSource = RolloutDataSourceWithBuffer  # slime's two classes: the one without a buffer is the same here


def _check_groups(groups: object, where: str) -> None:
    if not isinstance(groups, Sequence) or not all(
        isinstance(group, list) and group and all(isinstance(sample, Sample) for sample in group) for group in groups
    ):
        raise ValueError(f"{where} {type(groups).__name__}, not a list of groups (lists of Samples)")


def _fingerprint(prompts: list[Sample]) -> str:
    """A hash of the prompts, labels and images, and of tokens where rows hold them, in their order."""
    digest = hashlib.sha256()
    for sample in prompts:
        keys = [image.key for image in images_of(sample)]
        keys += [] if sample.adapter is None else [sample.adapter]
        digest.update(json.dumps([sample.prompt, sample.label, *keys], default=repr).encode())
        if sample.num_tokens:  # of a row that holds them (--mode sft)
            digest.update(np.asarray(sample.array("tokens"), np.int32).tobytes())
            digest.update(np.asarray(sample.array("loss_mask")).tobytes())
    return digest.hexdigest()[:16]


def images_in_states(*states: object) -> list[ImageRef]:
    """Return the images in states for a checkpoint, which live as long as this list; none in a run of text."""
    return [] if IMAGES.processor is None else list(images_in(list(states)))


# ------------------------------------------------------------------------------------------------ the run's
IMAGES_FOLDER = "images"  # next to a saved state
KEPT = 3  # rollouts whose state is kept, for the checkpoint after one of them


class PromptSource:
    """Owns the object of --data-source-path: its cursor, and what a checkpoint holds of it.

    hooked  the object itself, as rollout functions get it; None where the run reads no prompts
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.hooked: Any = None
        self._states: dict[int, dict[str, Any] | None] = {}  # rollout → state right after it
        self._images: dict[int, list[ImageRef]] = {}  # rollout → images in its state, which live as long as this list
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

    @property
    def can_be_restored(self) -> bool:
        """Return whether `restore` continues after a rollout in another process: not with images, which a process holds
        for itself, or a user's data source that gives no state or keeps files of it."""
        if self._config.pipelining.replay_schedule is not None or IMAGES.processor is not None:
            return False
        has_state = hasattr(self.hooked, "state_dict") and hasattr(self.hooked, "load_state_dict")
        return self.hooked is None or (has_state and not self._keeps_own_state())

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

    def state(self) -> dict[str, object] | None:
        """Return the state of now; None without a data source."""
        if self.hooked is None:
            return None
        if not hasattr(self.hooked, "state_dict"):
            return {}
        with self.guarded():
            return copy.deepcopy(self.hooked.state_dict())  # a user's may give what it changes later

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

    def keep(self, rollout_id: int) -> dict[str, object] | None:
        """Remember the state of now as that right after rollout `rollout_id`, and return it."""
        state = self.state()
        self.keep_with(rollout_id, state, None)
        return state

    def keeps(self, rollout_id: int) -> bool:
        return rollout_id in self._states

    def keep_with(
        self,
        rollout_id: int,
        state: dict[str, Any] | None,
        stream: SavedStream | None,
        images: Sequence[ImageRef] | None = None,
    ) -> None:
        """Remember `state` as that right after a rollout, with what a stream has under way by then, and its images."""
        if self.hooked is None:
            return
        self._states[rollout_id] = state
        self._images[rollout_id] = list(images_in_states(state, stream) if images is None else images)
        for old in [key for key in self._states if key <= rollout_id - KEPT]:
            del self._states[old]
            self._images.pop(old, None)
        self._streams = {} if stream is None else {rollout_id: stream}  # of the newest alone: it holds answers

    def take_stream(self) -> SavedStream | None:
        """Return what the checkpoint holds of a stream, once."""
        stream, self._loaded_stream = self._loaded_stream, None
        return stream

    def take_back(self) -> None:
        """Without a stream: let the prompts that one had under way at the checkpoint come first."""
        if (stream := self.take_stream()) is not None:
            from fusionrl.buffer.stream_state import blanks

            if groups := blanks(stream):
                self.take_in(groups)

    def save(self, path: Path, rollout_id: int) -> None:
        """Write the state as it was right after rollout `rollout_id` to `path` (JSON), and next to it its images."""
        assert self.hooked is None or rollout_id in self._states, f"no state of rollout {rollout_id} is kept"
        state: dict[str, object] = {"rollout_id": rollout_id, "source": self._states.get(rollout_id)}
        if (stream := self._streams.get(rollout_id)) is not None:
            state["stream"] = stream
        elif self._keeps_own_state():
            with self.guarded():
                self.hooked.save(rollout_id)
        IMAGES.save(self._images.get(rollout_id, ()), path.parent / IMAGES_FOLDER)
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
        self._images[rollout_id] = images_in_states(source, stream)
        IMAGES.load(self._images[rollout_id], path.parent / IMAGES_FOLDER)
        if self._keeps_own_state():
            with self.guarded():
                self.hooked.load(rollout_id)
        try:
            self.restore(rollout_id, source, stream)  # last: this is the state right after that rollout
        except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ValueError(
                f"{path}: it is not a state of this data source ({error!r:.300}); resume from another one"
            ) from error
        return rollout_id

    def restore(self, rollout_id: int, source: dict[str, object], stream: SavedStream | None) -> None:
        """Continue after a rollout, right after which the data source was in this state."""
        with self.guarded():
            if hasattr(self.hooked, "load_state_dict"):
                self.hooked.load_state_dict(source)
        self._states[rollout_id], self._loaded_stream = source, stream

    def _keeps_own_state(self) -> bool:
        """Return whether it is a user's with `save` and `load` of its own, as slime's users write it."""
        save = getattr(type(self.hooked), "save", None)
        return save is not None and save is not RolloutDataSourceWithBuffer.save
