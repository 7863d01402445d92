"""The Buffer: owns the rollout data, runs the user's rollout function, hands shards to the trainers.

It is an asyncio actor, and this file holds its messages alone. Its control loop never blocks: a rollout function is
synchronous, so it runs in a thread, and saves and questions about progress are answered while it does.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.buffer.collect import Collector, EngineEndpoints, HookBorder, RolloutFunctions
from fusionrl.buffer.cursor import BufferStart, Cursor
from fusionrl.buffer.data_source import PromptSource
from fusionrl.buffer.rollout_stages import Rollout, RolloutStages
from fusionrl.buffer.sample_files import TrainedColumns
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import pixels_of_sets
from fusionrl.config.hooks import HookError, user_code
from fusionrl.data.columns import ImageColumn
from fusionrl.data.image_store import IMAGES, MEGABYTE
from fusionrl.data.images import read_processor_files, widest_limits
from fusionrl.data.sample import Sample
from fusionrl.data.tokenizer import import_auto_tokenizer
from fusionrl.engines.images import FOLDER
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.plan.trained_parts import adapter_folders
from fusionrl.rewards.registry import runs_programs
from fusionrl.rollout.generate_state import samples_in_flight
from fusionrl.rollout.weight_versions import take_warnings

if TYPE_CHECKING:
    from fusionrl.buffer.evaluation import Evaluation
    from fusionrl.buffer.reject_sampling import AcceptedSamples
    from fusionrl.buffer.stream import Stream

logger = logging.getLogger(__name__)

METRICS = """
perf/time_generate_s | seconds | The rollout: generation, rewards, filters, and cutting it into shards.
perf/time_wait_rollout_s | seconds | How long the step waited for its batch. | --pipeline that runs ahead
perf/time_eval_s | seconds | An evaluation of all sets.
"""


class BufferActor:
    """See the module's docstring. A plain class: the cluster room makes it a Ray actor."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        run_dir: str,
        attempt: int,
        put: Callable[[object], object] | None = None,
    ) -> None:
        self.config, self.plan = config, plan
        self.run_dir = Path(run_dir)
        self.attempt = attempt
        self.endpoints = EngineEndpoints()
        self.source = PromptSource(config)
        self._put = put or _ray_put
        self._writer = RolloutWriter(self.run_dir)
        self._blaming = partial(writing_blamed, self._writer, attempt)
        self._abort = threading.Event()
        self._border = HookBorder(config, plan, self.run_dir, self._abort)
        self._accepted: AcceptedSamples | None = None
        if config.run.mode == "reject-sampling":
            from fusionrl.buffer.reject_sampling import AcceptedSamples

            self._accepted = AcceptedSamples.of(config, self.run_dir, attempt)
        self._importing = asyncio.Lock()
        self._validation: dict[str, list[object]] | None = None
        self._stream: Stream | None = None
        self._next_rollout = 0  # whose samples are under way
        self._is_replacement = False  # of a Buffer of this attempt that died

    # -------------------------------------------------------------------------------- control
    async def prepare(self) -> None:
        """Import what reading the data takes: seconds, in which the engines start and have no addresses yet."""
        async with self._importing:  # two threads that import transformers at once can break its lazy modules
            if self.config.run.load_debug_rollout_data is None:
                await asyncio.to_thread(_import_libraries)

    async def setup(self, endpoints: EngineEndpoints, place: BufferStart | None = None) -> dict[str, int]:
        """Load the hooks and read the prompt data. Returns the number of prompts, and of those left out as too long.

        place  of a Buffer that died, which this one takes; what that one wrote of later rollouts is written again

        Raises SandboxError if programs need a sandbox and this machine gives none.
        """
        config, plan, border = self.config, self.plan, self._border
        await self.prepare()
        self.endpoints = endpoints
        await self.set_engines(endpoints.engine_urls)
        open_image_store(config, plan, self.run_dir)
        self._functions = RolloutFunctions(config, self.source)
        self._collector = Collector(config, plan, border, self._functions, self.source)
        self._stages = RolloutStages(
            config, plan, border, self._collector, self._writer, self._accepted, self.attempt, self._put
        )
        await asyncio.to_thread(self.source.open, border)
        types = [rm_type for rm_type in self.source.reward_types() if isinstance(rm_type, str)]
        runs_any = plan.sandbox is not None or any(map(runs_programs, types))
        if runs_any or config.reward.allow_weak_sandbox:
            from fusionrl import sandbox

            sandbox.allow_weak(config.reward.allow_weak_sandbox)
            if runs_any:
                logger.info("sandbox: %s", await asyncio.to_thread(sandbox.probe))
        if place is not None:
            self._is_replacement = self._writer.overwrites = True
            if place.checkpoint is not None:
                await self.load(place.checkpoint)
            if place.cursor is not None and place.cursor.source is not None:
                stream = place.cursor.saved_stream(self.plan.knobs)
                self.source.restore(place.rollout_id, place.cursor.source, stream)
                self.source.keep_with(place.rollout_id, place.cursor.source, stream)  # for a checkpoint after it
            if self._accepted is not None:
                self._accepted.forget_after(place.rollout_id)
        return self.source.counts()

    async def set_engines(self, engine_urls: Sequence[str], eval_urls: Sequence[str] | None = None) -> None:
        """Take over where the engines are, from the next rollout on; `eval_urls`: of those that only evaluate."""
        eval_urls = self.endpoints.eval_urls if eval_urls is None else eval_urls
        self.endpoints = replace(self.endpoints, engine_urls=tuple(engine_urls), eval_urls=tuple(eval_urls))
        self.endpoints.export()
        self._border.endpoints = self.endpoints
        if self._stream is not None:
            await asyncio.to_thread(self._stream.set_engines, engine_urls)

    async def progress(self) -> str:
        """Return in words what is under way: samples, and what holds them up; "" where it is nothing."""
        waits_for = "" if self._stream is None else await asyncio.to_thread(self._stream.waits_for)
        return "; ".join(text for text in (samples_in_flight.describe(), waits_for) if text)

    async def save(self, path: str, rollout_id: int) -> None:
        """Write the data cursor as it was right after rollout `rollout_id` to `path` (JSON)."""
        await self._remember(rollout_id)
        await asyncio.to_thread(self.source.save, Path(path), rollout_id)

    async def load(self, path: str) -> int:
        """Resume from a file that `save` wrote; returns its rollout id. ValueError: it does not fit the prompt data."""
        rollout_id = self.source.load(Path(path))
        if self._accepted is not None:
            self._accepted.forget_after(rollout_id)
        return rollout_id

    async def state_hash(self, rollout_id: int | None = None) -> str:
        """SHA-256 of the data source's state, of now or right after a rollout."""
        await self._remember(rollout_id)
        return self.source.state_hash(rollout_id)

    async def _remember(self, rollout_id: int | None) -> None:
        """Remember what a checkpoint after rollout `rollout_id`, the newest that is trained, holds of the stream."""
        if self._stream is not None and rollout_id is not None and not self.source.keeps(rollout_id):
            self.source.keep_with(rollout_id, *await asyncio.to_thread(self._stream.snapshot, rollout_id))

    # -------------------------------------------------------------------------------- rollouts
    async def generate(self, rollout_id: int, pushed_version: int | None = None) -> Rollout:
        """Make rollout `rollout_id`: groups → rewards → shards in the object store.

        pushed_version  of the weights that the engines have, and that will train; None: the newest that a token has

        Raises HookError, RolloutAborted or ValueError with the flag concerned; nothing of the rollout is kept. A
        HookError names the file of the samples that the user's function was at.
        """
        self._abort.clear()
        self.source.take_back()
        self._border.pushed_version = pushed_version
        start = time.monotonic()
        with (
            phase("rollout", lane="rollouts", step=rollout_id + 1),
            self._blaming(rollout_id),
        ):
            rollout = await asyncio.to_thread(self._stages.make, rollout_id, pushed_version, start)
        state = self.source.keep(rollout_id)
        rollout.cursor = Cursor(state) if self.source.can_be_restored else None
        rollout.warnings += take_warnings()
        rollout.metrics["perf/time_generate_s"] = time.monotonic() - start
        return rollout

    async def add_trained(self, rollout_id: int, columns: Sequence[TrainedColumns | Awaitable[TrainedColumns]]) -> None:
        """Write what the trainers found out about the samples of a rollout (`PolicyTrainer.sample_columns`).

        columns  one part a data-parallel rank, or Ray references to them
        """
        parts = [part if isinstance(part, dict) else await part for part in columns]
        await asyncio.to_thread(self._stages.trained.add, rollout_id, parts)

    # -------------------------------------------------------------------------------- a stream
    async def begin_stream(self, num_trained: int) -> None:
        """Begin to generate without pause, after `num_trained` rollouts; the engines have their weights."""
        from fusionrl.buffer.schedule import Schedule, read_schedule, schedule_file
        from fusionrl.buffer.stream import Stream
        from fusionrl.buffer.stream_batches import BatchStream

        assert self.plan.knobs is not None
        self._abort.clear()
        self._border.pushed_version = num_trained
        functions, begun = self._functions, (self.plan.knobs, self._border, self.source, num_trained)
        saved = self.source.take_stream()
        stream: Stream
        if functions.where is None:
            record, needs_turns = self.config.pipelining.replay_schedule, self.plan.knobs.in_flight == "retract"
            entries = [] if record is None else await asyncio.to_thread(read_schedule, Path(record), needs_turns)
            path = schedule_file(self.run_dir, self.attempt)
            stream = Stream(*begun, saved, Schedule(path, entries, begins_again=self._is_replacement))
        else:
            stream = BatchStream(*begun, saved, functions, self._collector.call, self._abort)
        await asyncio.to_thread(stream.start)
        self._stream = stream

    async def next_rollout(self, rollout_id: int) -> Rollout:
        """Wait for the groups of rollout `rollout_id`; returns their shards, or raises what ended the stream."""
        start = time.monotonic()
        with (
            phase("rollout", lane="rollouts", step=rollout_id + 1),
            self._blaming(rollout_id),
        ):
            batch = await asyncio.to_thread(self._running.next_batch)
            rollout = await asyncio.to_thread(self._stages.make_of, rollout_id, batch, start)
        waited, rollout.cursor = time.monotonic() - start, batch.cursor
        rollout.warnings += take_warnings()
        rollout.metrics |= {"perf/time_generate_s": waited, "perf/time_wait_rollout_s": waited}
        self._next_rollout = rollout_id + 1
        return rollout

    async def rollout_trained(self) -> bool:
        """Note that the last rollout is trained. Return whether a push is due; if so, wait until it may begin."""
        with self._blaming(self._next_rollout):
            return await asyncio.to_thread(self._running.trained)

    async def weights_pushed(self, version: int) -> None:
        self._border.pushed_version = version
        with self._blaming(self._next_rollout):
            await asyncio.to_thread(self._running.pushed, version)

    async def end_stream(self) -> None:
        await asyncio.to_thread(self._running.stop)

    @property
    def _running(self) -> Stream:
        assert self._stream is not None, "begin_stream comes first"
        return self._stream

    # -------------------------------------------------------------------------------- evaluation
    @cached_property
    def _evaluation(self) -> Evaluation:
        from fusionrl.buffer.evaluation import Evaluation

        adapters = tuple(adapter_folders(self.config))
        return Evaluation(self.plan, self._border, self._functions, self._writer, self.run_dir, self.attempt, adapters)

    async def evaluate(self, rollout_id: int, pushed_version: int | None = None) -> dict[str, float]:
        """Evaluate on every set; returns eval/<set>/…, writes the samples and eval/<step>.json.

        pushed_version  of the weights that the engines have; None: nothing was pushed to them
        """
        start = time.perf_counter()
        with (
            phase("evaluation", lane="evaluations", step=rollout_id),
            self._blaming(rollout_id, "eval-failed"),
        ):
            metrics = await asyncio.to_thread(self._evaluation.run, rollout_id, pushed_version)
        return metrics | {"perf/time_eval_s": time.perf_counter() - start}

    async def validation_shards(self) -> dict[str, list[object]]:
        """--mode sft: set of --eval-prompt-data → one shard a rank, for `PolicyTrainer.evaluate_loss`; made once."""
        if self._validation is None:
            self._validation = await asyncio.to_thread(self._evaluation.validation_shards, self._put)
        return self._validation


def open_image_store(config: Config, plan: Plan, run_dir: Path) -> None:
    """Tell this process's store of images what the run says of it; nothing for a model of text alone.

    Raises:
        ValueError: the data have images, and the model's files do not say what sizes it takes.
    """
    data, folder = config.data, config.model.hf_checkpoint
    column = ImageColumn.of(data, folder)
    if folder is None or (column is None and plan.shape.vision is None):
        return
    try:
        processor = read_processor_files(folder) if column is None else column.processor
    except ValueError:
        if column is not None:
            raise
        return  # a model that could see is asked about text
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)  # files of a Buffer that was killed
    engine_limits = widest_limits(folder, pixels_of_sets(config))
    IMAGES.configure(data.image_cache_mb * MEGABYTE, run_dir, processor, engine_limits)


def _import_libraries() -> None:
    import_auto_tokenizer()
    import numpy.ma  # noqa: F401  # the first rollout would, by `np.unique`


def _ray_put(value: object) -> object:
    import ray

    return ray.put(value)


@contextmanager
def writing_blamed(writer: RolloutWriter, attempt: int, rollout_id: int, kind: str = "failed") -> Iterator[None]:
    """Write the samples at which a user's function raises to a file of the run, and name it in the error."""
    try:
        yield
    except HookError as error:
        samples = [sample for sample in error.samples if isinstance(sample, Sample)]
        if samples:
            try:
                rows = (sample.to_row() | {"error": str(error)} for sample in samples)
                with user_code("attributes of the user's", None):
                    path = writer.write(rollout_id, attempt, rows, kind=kind)
            except HookError as failure:  # the user's own error goes first
                logger.warning("the samples at which a user's function raised cannot be written: %s", failure)
            else:
                count = f"the {len(samples)} samples" if len(samples) > 1 else "the sample"
                error.add(f"{count} that it was at: {path}")
        raise
