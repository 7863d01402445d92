"""A pipeline in virtual time: the real controller over the model of engines, without processes and without waiting.

It says how long steps would take if the control plane took no time at all: for choosing knobs in seconds, and to tell
how much of a step over paced engines is the control plane's own.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from fusionrl.pipeline.controller import apply, decide
from fusionrl.pipeline.knobs import PIPELINES, Knobs
from fusionrl.pipeline.state import Admit, Admitted, Drop, Fetch, GroupReady, Push, Pushed, SampleDone, State, TrainDone
from tools.bench.engine_model import Company, Machine, PacedBatch, Request
from tools.bench.pipelines_paced import BATCHES_AFTER, Row, Setting


@dataclass
class Totals:
    """Modelled seconds and tokens so far, at the end of a push."""

    now: float
    busy_s: float
    trained_s: float
    prefilled_again: float
    stale_tokens: float  # of those that were trained, each counted as often as it is versions old
    tokens: float
    most_parked: int  # samples that continued across a push


class VirtualRun:
    """One pipeline. Groups go to the engine with the fewest requests, as a whole."""

    def __init__(self, setting: Setting, row: Row, num_steps: int) -> None:
        self._setting, self._row = setting, row
        preset = PIPELINES[row.pipeline] | row.flags
        per_engine = int(setting.max_running / setting.weight)
        self.knobs = Knobs(
            groups_per_fetch=setting.prompts // row.parts,
            samples_per_group=setting.samples,
            max_samples_in_flight=per_engine * setting.engines,
            num_fetches=(num_steps + BATCHES_AFTER) * row.parts,
            **{**preset, "update_weights_interval": row.parts},
        )
        self.state, self.now, self.pushes = State(), 0.0, list[Totals]()
        machine, company = Machine(gpus=setting.gpus), Company(setting.weight, setting.engines)
        self._engines = [PacedBatch(machine, company) for _ in range(setting.engines)]
        self._mean = setting.lengths.mean() * setting.batch
        self._group_of: dict[Request, int] = {}
        self._left: dict[int, int] = {}
        self._tokens: dict[int, float] = {}
        self._oldest: dict[int, int] = {}
        self._versions: dict[int, Counter[int]] = {}  # group -> version -> tokens
        self._stale_tokens = self._tokens_trained = 0.0
        self._most_parked = self.staleness_max = 0
        self._train_end: float | None = None
        self._push_end: float | None = None
        self._trained_s = 0.0

    def go(self, num_pushes: int) -> None:
        """Run until so many pushes are done."""
        while len(self.pushes) < num_pushes:
            while self._begin():
                pass
            due = [end for end in (self._train_end, self._push_end) if end is not None]
            due += [end for engine in self._engines if (end := engine.next_end()) is not None]
            self.now = max(min(due), self.now + 1e-3)
            self._end()

    def _begin(self) -> bool:
        """Begin the first action that may begin; returns whether there was one."""
        for action in decide(self.state, self.knobs):
            if isinstance(action, Admit):
                for _ in range(action.num_new):
                    self._admit()
                return True
            if isinstance(action, Fetch):
                tokens = sum(self._tokens[ordinal] for ordinal in action.ordinals)
                self._count_ages(action)
                log_probs_s = self._setting.log_probs_s if self._row.log_probs else 0.0
                seconds = (self._setting.update_s + log_probs_s) * tokens / self._mean
                self._trained_s += seconds
                self._train_end = self.now + seconds
            elif isinstance(action, Push):
                self._push_end = self.now + self._setting.push_s
                self._most_parked = max(self._most_parked, sum(len(engine.running) for engine in self._engines))
                for engine in self._engines:
                    engine.pause("in_place" if self.knobs.in_flight == "in_place" else "retract")
            elif not isinstance(action, Drop):
                continue
            apply(self.state, self.knobs, action)
            return True
        return False

    def _count_ages(self, fetch: Fetch) -> None:
        for ordinal in fetch.ordinals:
            for version, tokens in self._versions.pop(ordinal).items():
                self._tokens_trained += tokens
                self._stale_tokens += tokens * (fetch.version - version)
                self.staleness_max = max(self.staleness_max, fetch.version - version)

    def _admit(self) -> None:
        ordinal, count = self.state.next_ordinal, self._setting.samples
        apply(self.state, self.knobs, Admitted(ordinal, count))
        self._left[ordinal], self._tokens[ordinal], self._oldest[ordinal] = count, 0.0, self.state.version
        self._versions[ordinal] = Counter()
        engine = min(self._engines, key=lambda engine: len(engine.running) + len(engine.waiting))
        for number in range(count):
            lengths = self._setting.lengths
            request = Request(lengths.prompt, lengths.of(ordinal, number), cached=number > 0)
            self._group_of[request] = ordinal
            engine.join(request)

    def _end(self) -> None:
        """Note what ends at this moment."""
        for engine in self._engines:
            for request in engine.advance(self.now):
                ordinal = self._group_of.pop(request)
                self._left[ordinal] -= 1
                self._tokens[ordinal] += request.num_tokens
                before = 0.0
                for version, end in engine.spans_of(request):
                    self._versions[ordinal][int(version)] += end - before  # type: ignore[assignment]
                    before = end
                apply(self.state, self.knobs, SampleDone(ordinal))
                if not self._left[ordinal]:
                    apply(self.state, self.knobs, GroupReady(ordinal, self._oldest[ordinal]))
        if self._train_end is not None and self.now >= self._train_end:
            self._train_end = None
            apply(self.state, self.knobs, TrainDone())
        if self._push_end is not None and self.now >= self._push_end:
            self._push_end = None
            apply(self.state, self.knobs, Pushed())
            for engine in self._engines:
                engine.set_version(str(self.state.version))
                engine.resume()
            busy_s = sum(engine.busy_s for engine in self._engines)
            again = sum(engine.num_prefilled_again for engine in self._engines)
            ages = (self._stale_tokens, self._tokens_trained)
            self.pushes.append(Totals(self.now, busy_s, self._trained_s, again, *ages, self._most_parked))


def run_virtual(setting: Setting, row: Row, num_steps: int, warm_up: int) -> dict[str, Any]:
    """Run one pipeline; returns its figures of the steps after `warm_up`, of the names of `run_row`."""
    setting = replace(setting, **row.setting)
    run = VirtualRun(setting, row, warm_up + num_steps)
    run.go(warm_up + num_steps)
    last, first = run.pushes[-1], run.pushes[warm_up - 1]
    seconds = last.now - first.now
    share = setting.log_probs_s / (setting.log_probs_s + setting.update_s) if row.log_probs else 0.0
    return {
        "name": row.name,
        "pipeline": row.pipeline,
        "step_s": seconds / num_steps,
        "log_probs_s": share * (last.trained_s - first.trained_s) / num_steps,
        "engines_idle": 1 - (last.busy_s - first.busy_s) / seconds / setting.engines,
        "trainers_idle": 1 - (last.trained_s - first.trained_s) / seconds,
        "staleness": (last.stale_tokens - first.stale_tokens) / (last.tokens - first.tokens),
        "staleness_max": run.staleness_max,
        "most_parked": int(setting.weight) * last.most_parked,
        "tokens_prefilled_again": setting.weight * (last.prefilled_again - first.prefilled_again) / num_steps,
    }
