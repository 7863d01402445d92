"""The Buffer: owns the rollout data, runs the user's rollout function, hands shards to the trainers.

It is an asyncio actor. Its control loop never blocks: a rollout function is synchronous, so it runs in a thread,
and status, metrics, abort and save answer while it does.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fusionrl import sandbox
from fusionrl.algorithms.advantages import GROUP_ADVANTAGES
from fusionrl.algorithms.groups import SampleBatch
from fusionrl.base.environment import ROUTER_KEY
from fusionrl.buffer.accepted import AcceptedSamples
from fusionrl.buffer.build import build_shards, take_shards
from fusionrl.buffer.data_source import RolloutDataSourceWithBuffer
from fusionrl.buffer.rollout_facts import glimpses, rollout_facts
from fusionrl.buffer.rollout_metrics import eval_metrics, eval_set_metrics, rollout_metrics, set_metrics
from fusionrl.buffer.staleness import staleness_metrics, training_version
from fusionrl.buffer.trained import TrainedSamples
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import eval_sets
from fusionrl.config.hooks import HookError, call_hook, flag_of, load_function, user_code
from fusionrl.data.checked import read_samples
from fusionrl.data.convert import check_rewards, samples_of
from fusionrl.data.pairs import best_and_worst
from fusionrl.data.prompts import PromptColumns, load_conversations
from fusionrl.data.sample import Sample, Status, lacks_reward, response_mask
from fusionrl.engines.http import ROUTER_URLS
from fusionrl.observe.advice import Glimpse, RolloutFacts
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.observe.values import json_line, to_jsonable, write_atomically
from fusionrl.plan.batch import BatchPlan
from fusionrl.plan.plan import Plan
from fusionrl.rewards.dispatch import batched_async_rm, take_lost
from fusionrl.rewards.length import length_reward
from fusionrl.rewards.registry import runs_programs
from fusionrl.rollout.sft_rollout import to_sft_sample
from fusionrl.rollout.sglang_rollout import apply_filter
from fusionrl.rollout.teacher import score_samples
from fusionrl.rollout.types import RolloutAborted, as_eval_output, as_train_output, check_samples, flatten
from fusionrl.rollout.versions import fill_versions, noting_answers, take_warnings

logger = logging.getLogger(__name__)

SFT_ROLLOUT = "fusionrl.rollout.sft_rollout.generate_rollout"
DROPPED = "rollout/dropped_"  # metrics of this prefix count groups; they add up over calls
MAX_REFILLS = 10  # calls of a rollout function that keeps returning too few groups


@dataclass(frozen=True)
class EngineEndpoints:
    """Where the engines are; empty lists in a mode without engines."""

    router_url: str = ""
    engine_urls: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    rm_urls: tuple[str, ...] = ()
    teacher_urls: tuple[str, ...] = ()


@dataclass
class Rollout:
    """What the driver gets of a rollout: references to one shard a rank, and numbers."""

    rollout_id: int
    shards: list[Any]  # object references; the trainers pull what they stand for
    metrics: dict[str, float] = field(default_factory=dict)
    num_accepted: int = 0
    auxiliary_shards: list[Any] = field(default_factory=list)  # the same samples, cut for the critic's or prm's ranks
    warnings: list[str] = field(default_factory=list, kw_only=True)  # for the console
    facts: RolloutFacts | None = field(default=None, kw_only=True)  # for warnings; not in --mode sft
    glimpses: list[Glimpse] = field(default_factory=list, kw_only=True)  # --log-samples of its samples


class BufferActor:
    """See the module's docstring. A plain class: the cluster room makes it a Ray actor."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        run_dir: str,
        attempt: int,
        endpoints: EngineEndpoints,
        put: Callable[[Any], Any] | None = None,
    ) -> None:
        self.config, self.plan = config, plan
        self.run_dir = Path(run_dir)
        self.attempt = attempt
        self.endpoints = endpoints
        self._put = put or _ray_put
        self._writer = RolloutWriter(self.run_dir)
        self._trained = TrainedSamples(self._writer)
        self._abort = threading.Event()
        self._phase = "idle"
        self._phase_since = time.monotonic()
        self._states: dict[int, dict[str, Any]] = {}  # rollout → data source state right after it
        self._last_metrics: dict[str, float] = {}
        self._source: Any = None
        self._validation: dict[str, list[Any]] | None = None
        rejecting = config.reject_sampling
        self._accepted = AcceptedSamples(
            Path(rejecting.reject_sampling_output or self.run_dir / "accepted.jsonl"),
            rejecting.reject_sampling_threshold,
            rejecting.reject_sampling_per_prompt,
        )
        self._is_accepted_clean = False  # whether rows of rollouts that are made again have been dropped

    # -------------------------------------------------------------------------------- control
    async def setup(self) -> dict[str, Any]:
        """Load the hooks and read the prompt data. Returns the number of prompts, and of those left out as too long."""
        run = self.config.run
        await self.set_engines(self.endpoints.engine_urls)
        path = self.config.rollout.rollout_function_path
        default = type(self.config.rollout)().rollout_function_path
        if run.mode == "sft" and path == default:
            path = SFT_ROLLOUT
        self._rollout_function = load_function(path)
        self._eval_function = load_function(
            self.config.rollout.eval_function_path or self.config.rollout.rollout_function_path
        )
        self._eval_sets = eval_sets(self._args())
        if self.config.data.prompt_data is not None and run.mode != "eval" and not run.load_debug_rollout_data:
            path = self.config.data.data_source_path
            make = load_function(path)
            if path == type(self.config.data)().data_source_path:
                self._source = await asyncio.to_thread(make, self._args())
            else:
                self._source = await asyncio.to_thread(call_hook, "data_source_path", path, self._args())
            self._states[-1] = self._source_state()
        await self._probe_sandbox()
        with self._source_code():
            num_prompts = len(self._source) if self._source is not None else 0
        return {
            "num_prompts": num_prompts,
            "num_too_long": getattr(self._source, "num_too_long", 0),
        }

    async def _probe_sandbox(self) -> None:
        """Say which sandbox this machine, on which the programs will run, gives to them.

        Raises:
            SandboxError: none, and the run or a row of its data needs one.
        """
        sandbox.allow_weak(self.config.reward.allow_weak_sandbox)
        prompts = getattr(self._source, "prompts", ())  # a user's data source may have none
        types = {sample.metadata.get("rm_type") for sample in prompts if isinstance(sample.metadata, dict)}
        if self.plan.sandbox is not None or any(isinstance(one, str) and runs_programs(one) for one in types):
            logger.info("sandbox: %s", await asyncio.to_thread(sandbox.probe))

    async def set_engines(self, engine_urls: Sequence[str]) -> None:
        """Where the engines are from the next rollout on."""
        self.endpoints = replace(self.endpoints, engine_urls=tuple(engine_urls))
        if self.endpoints.api_key is not None:
            os.environ[ROUTER_KEY] = self.endpoints.api_key
            urls = [self.endpoints.router_url, *engine_urls, *self.endpoints.rm_urls, *self.endpoints.teacher_urls]
            os.environ[ROUTER_URLS] = " ".join(urls)

    async def status(self) -> dict[str, Any]:
        """What the Buffer is doing, since how many seconds, and the data cursor."""
        cursor = {name: getattr(self._source, name, None) for name in ("epoch", "offset")}
        return {"phase": self._phase, "seconds": time.monotonic() - self._phase_since, **cursor}

    async def metrics(self) -> dict[str, float]:
        """Metrics of the last finished rollout."""
        return dict(self._last_metrics)

    async def abort(self) -> None:
        """Stop the rollout that is running, if any; its prompts go back to the data source."""
        self._abort.set()

    async def save(self, path: str, rollout_id: int) -> None:
        """Write the data cursor as it was right after rollout `rollout_id` to `path` (JSON)."""
        if self._keeps_own_state():
            with self._source_code():
                self._source.save(rollout_id)
        assert self._source is None or rollout_id in self._states, f"no state of rollout {rollout_id} is kept"
        source = self._states.get(rollout_id)
        state = {"rollout_id": rollout_id, "source": source}
        write_atomically(Path(path), json.dumps(state))

    async def load(self, path: str) -> int:
        """Go on from a file that `save` wrote; returns its rollout id.

        Raises:
            ValueError: the state does not fit the prompt data.
        """
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
            rollout_id, source = state["rollout_id"], state["source"]
            if type(rollout_id) is not int:
                raise TypeError(f"rollout_id is {rollout_id!r:.40}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: no state of the Buffer ({error!r:.300}); resume from another one") from error
        if self._source is not None and source is not None:
            with self._source_code():
                if self._keeps_own_state():
                    self._source.load(rollout_id)
                if hasattr(self._source, "load_state_dict"):  # last: this is the state right after that rollout
                    try:
                        self._source.load_state_dict(source)
                    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
                        raise ValueError(
                            f"{path}: it is no state of this data source ({error!r:.300}); resume from another one"
                        ) from error
            self._states[rollout_id] = source
        if self.config.run.mode == "reject-sampling":
            self._accepted.forget_after(rollout_id)
        return rollout_id

    async def cursor(self) -> dict[str, Any] | None:
        """The data source's state, for comparisons."""
        return self._source_state() if self._source is not None else None

    async def state_hash(self) -> str:
        """SHA-256 of the data source's state: the cursor, and samples that it holds."""
        state = self._source_state() if self._source is not None else None
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

    def _keeps_own_state(self) -> bool:
        """Whether the data source is a user's with `save` and `load` of its own, as slime's users write it."""
        save = getattr(type(self._source), "save", None)
        return save is not None and save is not RolloutDataSourceWithBuffer.save

    def _source_state(self) -> dict[str, Any]:
        if hasattr(self._source, "state_dict"):
            with self._source_code():
                return self._source.state_dict()
        return {}

    def _set_phase(self, phase: str) -> None:
        self._phase, self._phase_since = phase, time.monotonic()

    def _args(self, **extra: Any) -> Any:
        """A fresh copy of the flags for one call of a hook, with slime's names for what the run adds."""
        router = self.endpoints.router_url.removeprefix("http://")
        host, _, port = router.rpartition(":")
        return self.config.to_args(
            sglang_router_ip=host or None,
            sglang_router_port=int(port) if port else None,
            router_url=self.endpoints.router_url,
            engine_urls=list(self.endpoints.engine_urls),
            api_key=self.endpoints.api_key,
            rm_urls=list(self.endpoints.rm_urls),
            teacher_urls=list(self.endpoints.teacher_urls),
            rollout_global_dataset=True,
            vocab_size=self.plan.shape.vocab_size,
            routed_experts_size=self._routed_experts_size(),
            num_experts=self._limits()[1],
            save=str(self.run_dir / "checkpoints"),
            load=None,
            run_dir=str(self.run_dir),
            abort_event=self._abort,
            **extra,
        )

    def _routed_experts_size(self) -> tuple[int, int] | None:
        """(layers, experts of a token), where the engines are asked which experts they chose."""
        shape = self.plan.shape
        asks = self.config.algorithm.use_rollout_routing_replay and self.plan.device == "cuda"
        return (shape.num_layers, shape.moe.topk) if asks and shape.moe is not None else None

    # -------------------------------------------------------------------------------- rollouts
    async def generate(self, rollout_id: int, pushed_version: int | None = None) -> Rollout:
        """Make rollout `rollout_id`: groups → rewards → shards in the object store.

        pushed_version  of the weights that the engines have, and that will train; None: the newest that a token has

        Raises:
            HookError, RolloutAborted, ValueError: with the flag concerned; nothing of the rollout is kept. A HookError
                names the file of the samples that the user's function was at.
        """
        self._abort.clear()
        self._set_phase(f"rollout of step {rollout_id + 1}")
        start = time.perf_counter()
        try:
            with self._writing_blamed(rollout_id, "failed"):
                rollout = await asyncio.to_thread(self._generate, rollout_id, pushed_version)
        finally:
            self._set_phase("idle")
        if self._source is not None:
            self._states[rollout_id] = self._source_state()
            for old in [key for key in self._states if key < rollout_id - 2]:
                del self._states[old]
        rollout.warnings += take_warnings()
        rollout.metrics["perf/time_generate_s"] = time.perf_counter() - start
        self._last_metrics = rollout.metrics
        return rollout

    def _generate(self, rollout_id: int, pushed_version: int | None) -> Rollout:
        mode = self.config.run.mode
        metrics: dict[str, float] = {}
        facts, shown = None, list[Glimpse]()
        if self.config.run.load_debug_rollout_data:
            samples = self._load_saved(rollout_id)
            pushed_version = None  # their versions are those of another run
        else:
            samples, metrics = self._collect_samples(rollout_id)
            asyncio.run(score_samples(self._args(), samples))  # those of a user's rollout function
        if self.config.run.save_debug_rollout_data:
            self._save_samples(rollout_id, samples)
        version = training_version(samples, pushed_version)
        if mode == "sft":
            raw = rewards = [0.0] * len(samples)
            metrics["rollout/num_samples"] = float(len(samples))
        else:
            raw, rewards = self._rewards(samples)
            indices = np.array([-1 if s.group_index is None else s.group_index for s in samples])
            usual = rollout_metrics(samples, raw, indices)
            if self._logs_itself(rollout_id, samples, metrics):
                usual = {name: usual[name] for name in ("rollout/num_samples", "rollout/num_tokens")}
            metrics.update(usual | staleness_metrics(samples, version))
            metrics.update({f"rollout/reward_{reason}": float(count) for reason, count in take_lost().items()})
            if len(self.config.data.prompt_data or []) > 1:
                metrics.update(set_metrics(samples, raw))
            facts = rollout_facts(self.config, samples, raw, rewards)
            shown = glimpses(samples, raw, self.config.run.log_samples)
            written = self._writer.write(rollout_id, self.attempt, (s.to_row() for s in samples), kind="train")
            self._trained.wrote(written, samples)
        counts = self._accept(rollout_id, samples, raw) if mode == "reject-sampling" else {}
        if mode == "reject-sampling":
            metrics.update({f"rollout/{name}": float(count) for name, count in counts.items()})
        shards: list[Any] = []
        auxiliary_shards: list[Any] = []
        if self.plan.balance is not None and self.plan.batch is not None and mode in ("rl", "sft"):
            extra: dict[str, list[Any]] = {}
            has_indices = True
            path = self.config.reward.custom_convert_samples_to_train_data_path
            if path is not None and mode == "rl":
                field = "custom_convert_samples_to_train_data_path"
                data = call_hook(field, path, self._args(), samples)
                where = f"{flag_of(field)} {path}"
                samples, rewards, raw, extra = samples_of(data, samples, where)
                check_samples(field, path, samples, self._args())
                has_indices = "sample_indices" in data
            named: dict[str, Any] = {"rollout_id": rollout_id, "weight_version": version}
            if mode == "rl" and self.config.algorithm.policy_loss == "dpo":
                samples, rewards, raw, extra = self._pairs(samples, rewards, raw, extra)
                named["by_groups"] = True
            self._trained.gave(rollout_id, samples, has_indices)
            given, named["extra"] = (samples, rewards, raw), extra
            if (auxiliary := self.plan.auxiliary) is not None:
                assert auxiliary.batch is not None
                cut = build_shards(*given, auxiliary.batch, auxiliary.balance, **named)
                auxiliary_shards = [self._put(shard) for shard in cut]
            built = take_shards(*given, self.plan.batch, self.plan.balance, **named, freed=_give_memory_back)
            shards = list(map(self._put, built))  # no name holds a shard while the next one is made
        accepted = counts.get("accepted", 0)
        return Rollout(rollout_id, shards, metrics, accepted, auxiliary_shards, facts=facts, glimpses=shown)

    async def add_trained(self, rollout_id: int, columns: Sequence[Any]) -> None:
        """Write what the trainers found out about the samples of a rollout (`TrainerActor.sample_columns`).

        columns  one part a data-parallel rank, or Ray references to them
        """
        parts = [part if isinstance(part, dict) else await part for part in columns]
        await asyncio.to_thread(self._trained.add, rollout_id, parts)

    def _pairs(
        self, samples: list[Sample], rewards: list[float], raw: list[float], extra: dict[str, list[Any]]
    ) -> tuple[list[Sample], list[float], list[float], dict[str, list[Any]]]:
        """DPO: the pairs of the rollout, chosen (+1) and rejected (-1) side by side, with what belongs to them.

        Where there are fewer than optimizer steps, removed samples stand for the others: of these nothing is learnt.
        """
        pairs = best_and_worst(samples, rewards)
        chosen = [i for pair in pairs for i in pair]
        assert self.plan.batch is not None
        num_blank = max(0, self.plan.batch.num_steps - len(pairs))
        blanks = [replace(samples[0], remove_sample=True, group_index=-2 - i // 2) for i in range(2 * num_blank)]
        positions = chosen + [0] * len(blanks)
        return (
            [samples[i] for i in chosen] + blanks,
            [1.0, -1.0] * (len(pairs) + num_blank),
            [raw[i] for i in positions],
            {name: [values[i] for i in positions] for name, values in extra.items()},
        )

    def _accept(self, rollout_id: int, samples: list[Sample], raw: list[float]) -> dict[str, int]:
        if self.attempt > 1 and not self._is_accepted_clean:
            self._accepted.forget_after(rollout_id - 1)
        self._is_accepted_clean = True
        return self._accepted.add(rollout_id, samples, raw)

    def _logs_itself(self, rollout_id: int, samples: list[Sample], metrics: dict[str, float]) -> bool:
        """Whether the user's function reported the rollout in place of the usual metrics."""
        path = self.config.rollout.custom_rollout_log_function_path
        if path is None:
            return False
        seconds = time.monotonic() - self._phase_since
        return bool(
            call_hook("custom_rollout_log_function_path", path, rollout_id, self._args(), samples, metrics, seconds)
        )

    def _collect_samples(self, rollout_id: int) -> tuple[list[Sample], dict[str, float]]:
        """Call the rollout function until there are enough groups; score and filter what it left undone."""
        wanted = self.config.rollout.rollout_batch_size
        assert wanted is not None
        groups: list[list[Sample]] = []
        metrics: dict[str, float] = {}
        dropped: Counter[str] = Counter()
        options = self.config.rollout
        for _ in range(MAX_REFILLS):
            args = self._args()
            with noting_answers(args, keeps_tokens=False) as answers:
                output = as_train_output(self._call_rollout(args, rollout_id))
            if options.rollout_function_path != type(options)().rollout_function_path and self.endpoints.router_url:
                where = f"--rollout-function-path {options.rollout_function_path}"
                fill_versions(flatten(output.samples), answers, where)
            dropped.update({k: v for k, v in output.metrics.items() if k.startswith(DROPPED)})
            metrics.update(output.metrics)
            groups += self._finish(args, output.samples, dropped)
            if len(groups) >= wanted:
                break
        if len(groups) < wanted:
            raise ValueError(
                f"--rollout-function-path {self.config.rollout.rollout_function_path}: {MAX_REFILLS} calls gave"
                f" {len(groups)} groups that pass the filter, --rollout-batch-size is {wanted}"
            )
        if len(groups) > wanted:
            dropped[f"{DROPPED}surplus"] += len(groups) - wanted
        args = self._args()
        if options.rollout_all_samples_process_path:
            path = options.rollout_all_samples_process_path
            call_hook("rollout_all_samples_process_path", path, args, groups, self._source.get_samples)
        groups = groups[:wanted]
        if options.rollout_sample_filter_path:
            call_hook("rollout_sample_filter_path", options.rollout_sample_filter_path, args, groups)
        for position, group in enumerate(groups):
            _number_group(group, position)
            check_samples("rollout_function_path", options.rollout_function_path, group, args)
        return flatten(groups), {**metrics, **dropped}

    def _call_rollout(self, args: Any, rollout_id: int, evaluation: bool = False) -> Any:
        """Call the rollout function, or with `evaluation` the one that evaluates."""
        rollout = self.config.rollout
        field = "eval_function_path" if evaluation and rollout.eval_function_path else "rollout_function_path"
        path = getattr(rollout, field)
        function = self._eval_function if evaluation else self._rollout_function
        keywords = {"evaluation": True} if evaluation else {}
        if path == type(rollout)().rollout_function_path:
            with self._source_code():  # of the user's functions in it, only the data source does not name itself
                return function(args, rollout_id, self._source, **keywords)
        with user_code(f"{flag_of(field)} {path}", path, passing=(RolloutAborted,)):
            return function(args, rollout_id, self._source, **keywords)

    def _source_code(self) -> AbstractContextManager[None]:
        """A block in which what a user's data source raises names it."""
        path = self.config.data.data_source_path
        return user_code(f"--data-source-path {path}", path, only_theirs=True)

    @contextmanager
    def _writing_blamed(self, rollout_id: int, kind: str) -> Iterator[None]:
        """Write the samples at which a user's function raised to a file of the run, and name it in the error."""
        try:
            yield
        except HookError as error:
            samples = [sample for sample in error.samples if isinstance(sample, Sample)]
            if samples:
                try:
                    rows = (sample.to_row() | {"error": str(error)} for sample in samples)
                    path = self._writer.write(rollout_id, self.attempt, rows, kind=kind)
                except Exception as failure:  # attributes of a user's may not be writable; the user's error goes first
                    logger.warning("the samples at which a user's function raised cannot be written: %s", failure)
                else:
                    count = f"the {len(samples)} samples" if len(samples) > 1 else "the sample"
                    error.add(f"{count} that it was at: {path}")
            raise

    def _finish(self, args: Any, groups: list[list[Sample]], dropped: Counter[str]) -> list[list[Sample]]:
        """Rewards that are still missing are computed; groups that got them here are filtered here."""
        if self.config.run.mode == "sft":
            return groups
        kept: list[list[Sample]] = []
        for group in groups:
            missing = [s for s in group if s.reward is None and s.status not in (Status.FAILED, Status.ABORTED)]
            if missing:
                for sample, reward in zip(missing, asyncio.run(batched_async_rm(args, missing)), strict=True):
                    sample.reward = reward
                verdict = apply_filter(args, group)
                if not verdict.keep:
                    dropped[f"{DROPPED}{verdict.reason or 'filtered'}"] += 1
                    continue
            kept.append(group)
        return kept

    def _rewards(self, samples: list[Sample]) -> tuple[list[float], list[float]]:
        """Raw rewards, and those that are trained on: with penalties for length, normalised over each group."""
        args = self._args()
        path = self.config.reward.custom_reward_post_process_path
        if path is not None:
            found = call_hook("custom_reward_post_process_path", path, args, samples)
            if not isinstance(found, tuple | list) or len(found) != 2:
                said = f"it returned {type(found).__name__}; a tuple (raw rewards, rewards) is wanted"
                raise HookError(f"--custom-reward-post-process-path {path}: {said}")
            raw, rewards = found
            if len(raw) != len(samples) or len(rewards) != len(samples):
                raise ValueError(
                    f"--custom-reward-post-process-path {path}:"
                    f" it returned {len(raw)} raw and {len(rewards)} rewards for {len(samples)} samples"
                )
            raw, rewards = [float(r) for r in raw], [float(r) for r in rewards]
            check_rewards(raw, rewards, f"--custom-reward-post-process-path {path}")
            return raw, rewards
        raw = [0.0 if lacks_reward(s) else s.get_reward_value(args) for s in samples]
        longest = self.config.rollout.rollout_max_response_len
        shaped = [
            r + length_reward(s.response_length, longest, self.config.reward) for s, r in zip(samples, raw, strict=True)
        ]
        return raw, self._group_advantages(samples, shaped)

    def _group_advantages(self, samples: list[Sample], rewards: list[float]) -> list[float]:
        """What each sample's reward is worth beside its siblings'; untouched where the trainers' estimator does it."""
        algorithm = self.config.algorithm
        alike = {"gspo": "grpo", "cispo": "grpo", "prime": "rloo"}
        name = alike.get(algorithm.advantage_estimator, algorithm.advantage_estimator)
        is_left = algorithm.disable_rewards_normalization or algorithm.policy_loss == "dpo"
        if is_left or name not in GROUP_ADVANTAGES or self.config.run.mode != "rl":
            return rewards
        if name == "grpo" and algorithm.disable_grpo_std_normalization:
            name = "dr_grpo"
        groups = [s.group_index if s.group_index is not None else -1 - i for i, s in enumerate(samples)]
        batch = SampleBatch(
            np.asarray(rewards, np.float64),
            np.array(groups),
            lengths=np.array([response_mask(sample).sum() for sample in samples]),
            baselines=self._baselines(samples) if name == "remax" else None,
            k=algorithm.pass_k,
            scored=np.array([not lacks_reward(sample) for sample in samples], bool),
        )
        return GROUP_ADVANTAGES[name](batch).tolist()

    def _baselines(self, samples: list[Sample]) -> np.ndarray:
        """[n] reward of the greedy answer to each sample's prompt, shaped as rewards are."""
        missing = [sample.index for sample in samples if sample.baseline_reward is None]
        if missing:
            raise ValueError(
                f"--advantage-estimator remax: sample {missing[0]} has no baseline_reward, that of a greedy answer"
                " to its prompt; the default rollout sets it, a function of --rollout-function-path has to"
            )
        return np.array([sample.baseline_reward for sample in samples], np.float64)

    # -------------------------------------------------------------------------------- replay
    def _save_samples(self, rollout_id: int, samples: list[Sample]) -> None:
        path = Path(str(self.config.run.save_debug_rollout_data).format(rollout_id=rollout_id))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            out.writelines(json_line(sample.to_row()) for sample in samples)

    def _load_saved(self, rollout_id: int) -> list[Sample]:
        path = Path(str(self.config.run.load_debug_rollout_data).format(rollout_id=rollout_id))
        if not path.is_file():
            raise ValueError(f"--load-debug-rollout-data: there is no {path}")
        try:
            return read_samples(path, *self._limits())
        except ValueError as error:
            raise ValueError(f"--load-debug-rollout-data: {error}") from error

    def _limits(self) -> tuple[int, int | None]:
        """(tokens of the vocabulary, experts of a layer or None): what numbers in samples are checked against."""
        shape = self.plan.shape
        return shape.vocab_size, shape.moe.num_experts if shape.moe is not None else None

    # -------------------------------------------------------------------------------- evaluation
    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Evaluate on every set; returns eval/<set>/…, writes the samples and eval/<step>.json."""
        self._set_phase(f"evaluation after step {rollout_id}")
        start = time.perf_counter()
        try:
            with self._writing_blamed(rollout_id, "eval-failed"):
                output = await asyncio.to_thread(self._call_rollout, self._args(), rollout_id, evaluation=True)
        finally:
            self._set_phase("idle")
        result = as_eval_output(output)
        for name, found in result.data.items():
            rows = (sample.to_row() for sample in found.get("samples", []))
            self._writer.write(rollout_id, self.attempt, rows, kind=f"eval-{name}")
        self._write_summary(rollout_id, result.data)
        path = self.config.rollout.custom_eval_rollout_log_function_path
        field, args = "custom_eval_rollout_log_function_path", self._args()
        with self._writing_blamed(rollout_id, "eval-failed"):
            itself = path is not None and call_hook(field, path, rollout_id, args, result.data, result.metrics)
        return {
            **({} if itself else eval_metrics(result.data)),
            **{f"eval/reward_{reason}": float(count) for reason, count in take_lost().items()},
            **result.metrics,
            "perf/time_eval_s": time.perf_counter() - start,
        }

    async def validation_shards(self) -> dict[str, list[Any]]:
        """--mode sft: set of --eval-prompt-data → one shard a rank, for `TrainerActor.evaluate_loss`; made once."""
        if self._validation is None:
            self._validation = await asyncio.to_thread(self._make_validation_shards)
        return self._validation

    def _make_validation_shards(self) -> dict[str, list[Any]]:
        assert self.plan.balance is not None and self.plan.batch is not None
        args, dp_size = self._args(), self.plan.batch.dp_size
        shards = {}
        for one in self._eval_sets:
            columns = PromptColumns(one.input_key, one.label_key, one.metadata_key, one.tool_key)
            samples = load_conversations(one.path, columns, f"--eval-prompt-data {one.name}").samples
            for index, sample in enumerate(samples):
                sample.index = sample.group_index = index
            samples = [to_sft_sample(args, sample) for sample in samples]
            zeros, count = [0.0] * len(samples), len(samples)
            batch = BatchPlan(count, 1, 1, count, dp_size)
            built = build_shards(samples, zeros, zeros, batch, self.plan.balance, rollout_id=-1)
            shards[one.name] = [self._put(shard) for shard in built]
        return shards

    def _write_summary(self, rollout_id: int, data: dict[str, dict[str, Any]]) -> None:
        """Write eval/<step>.json: each set's metrics, and the settings that they were found with (null: a user's)."""
        settings = {one.name: one.model_dump() for one in self._eval_sets}
        sets = {
            name: {"metrics": eval_set_metrics(name, found), "settings": settings.get(name)}
            for name, found in data.items()
        }
        folder = self.run_dir / "eval"
        folder.mkdir(exist_ok=True)
        summary = to_jsonable({"step": rollout_id, "attempt": self.attempt, "sets": sets})
        write_atomically(folder / f"{rollout_id}.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def _number_group(group: list[Sample], position: int) -> None:
    """Samples that a rollout function made without a group get their group's number, or one below zero."""
    known = (sample.group_index for sample in group if sample.group_index is not None)
    number = next(known, -2 - position)
    for sample in group:
        if sample.group_index is None:
            sample.group_index = number


def _give_memory_back() -> None:
    """Return what was freed to the system: glibc keeps the room of many small arrays for itself. Elsewhere nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _ray_put(value: Any) -> Any:
    import ray

    return ray.put(value)
