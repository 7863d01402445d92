"""A trainer of several adapters (--lora-adapters): each learns, is saved and restored as in a run of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from fusionrl.plan.adapters import adapter_folders, has_several_adapters
from fusionrl.trainer.model_rank import Restored, SetupFacts
from fusionrl.trainer.trainer_base import Learned, TrainerBase

if TYPE_CHECKING:
    import numpy as np

    from fusionrl.trainer.adapter_states import AdapterStates
    from fusionrl.trainer.shard_pull import ShardSource

REPORTED = ("loss", "grad_norm", "lr", "skipped")
"""Metrics of a step that each of several adapters reports under its name."""


class AdapterTrainer(TrainerBase):
    """A rank with one adapter in the model; `adapter_states` has the others. None: the run has one, or none."""

    adapter_states: AdapterStates | None = None

    def setup(self, master_addr: str, master_port: int) -> SetupFacts:
        """As of `TrainerBase`; adapters without a folder begin as that of a run of its own does."""
        facts = super().setup(master_addr, master_port)
        assert self.role is None, "critics have no adapters"
        if not has_several_adapters(self.config):
            return facts
        from fusionrl.models.hf_io import load_peft
        from fusionrl.trainer.adapter_states import AdapterStates, Progress

        folders, spec = adapter_folders(self.config), self.adapter_spec
        assert spec is not None
        self.adapter_states = states = AdapterStates(self.trained, list(folders), Progress(self.counters, self._skips))
        for name, folder in folders.items():
            if folder is not None:
                states.switch(name)
                load_peft(folder, self.trained.chunks, self.shape, spec)
                self.trained.optimizer.reload_model_params()
        self.take_adapter(next(iter(folders)))
        return facts

    def take_adapter(self, name: str | None) -> None:
        """Bring an adapter into the model; None: it is there."""
        if self.adapter_states is None or name is None:
            return
        self.adapter_states.switch(name)
        progress = self.adapter_states.progress
        self.counters, self._skips = progress.counters, progress.skips

    def lent_adapter(self, name: str | None) -> AbstractContextManager[None]:
        """Within it the model computes with an adapter's parameters, for a forward pass or an export."""
        states = self.adapter_states
        return nullcontext() if states is None or name is None else states.lent(name)

    def score(self, shard: ShardSource, weights: str | None = None, only_weights: bool = False) -> list[np.ndarray]:
        """As of `TrainerBase`, with the adapter of the shard."""
        if self.adapter_states is None:
            return super().score(shard, weights, only_weights)
        from fusionrl.trainer.shard_pull import pull

        pulled = pull(shard)
        self.reload(only_weights)
        with self.lent_adapter(pulled.adapter):
            return super().score(pulled, weights, only_weights)

    def metrics_by_adapter(self, learned: Mapping[str | None, Learned]) -> dict[str, float]:
        """Return adapter/<name>/… of what each adapter learned; nothing with one."""
        metrics: dict[str, float] = {}
        for name, part in learned.items():
            if name is not None:
                own = self.metrics_of([part])
                metrics |= {f"adapter/{name}/{metric}": own[f"train/{metric}"] for metric in REPORTED}
                metrics[f"adapter/{name}/optimizer_steps"] = float(len(part.reports))
        return metrics

    # ------------------------------------------------------------------------------------------- checkpoints
    def _each(self) -> Iterator[str]:
        """Bring one adapter after the other into the model, and yield its name."""
        assert self.adapter_states is not None
        for name in self.adapter_states.order():
            self.take_adapter(name)
            yield name

    def begin_save(self, path: str, rollout_id: int) -> None:
        """As of `ModelRank`, with a folder for each adapter, PATH-NAME."""
        if self.adapter_states is None:
            return super().begin_save(path, rollout_id)
        self.finish_save()
        self.reload()
        for name in self._each():
            earlier, self._saving = self._saving, None
            try:
                super().begin_save(f"{path}-{name}", rollout_id)
            finally:  # the saves that have started are finished, even if the next one cannot start
                if self._saving is None:
                    self._saving = earlier
                else:
                    self._saving.earlier = earlier

    def load(self, path: str) -> Restored:
        """As of `ModelRank`; the facts are those of the last adapter, with the hashes of all."""
        if self.adapter_states is None:
            return super().load(path)
        self.reload()
        hashes: dict[str, str] = {}
        for name in self._each():
            restored = super().load(f"{path}-{name}")
            self.adapter_states.progress.counters = self.counters
            hashes |= _of_adapter(name, restored.get("hashes", {}))
        if hashes:
            restored["hashes"] = hashes
        return restored

    def state_hashes(self) -> dict[str, str]:
        """As of `ModelRank`, of each adapter."""
        if self.adapter_states is None:
            return super().state_hashes()
        self.reload()
        hashes: dict[str, str] = {}
        for name in self._each():
            hashes |= _of_adapter(name, super().state_hashes())
        return hashes

    def save_hf(self, path: str) -> None:
        """As of `ModelRank`, with a folder for each adapter, PATH/NAME."""
        if self.adapter_states is None:
            return super().save_hf(path)
        self.reload()
        for name in self._each():
            super().save_hf(f"{path}/{name}")


def _of_adapter(name: str, hashes: dict[str, str]) -> dict[str, str]:
    return {f"{kind} of {name}": value for kind, value in hashes.items()}
