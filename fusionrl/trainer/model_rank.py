"""One rank's part of a model with its optimizer: it is built, given away and taken back, saved and loaded.

This module and those of the roles import torch and Megatron only within their methods: the driver imports the classes,
and it starts without either. Megatron-core is imported by `setup`, after the CPU layer is in place.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar, NotRequired, TypedDict

from fusionrl.algorithms.estimators import Role
from fusionrl.base.imports import without_collections
from fusionrl.base.process import give_freed_back, keep_freed
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import sees_images
from fusionrl.config.hooks import register_hooks
from fusionrl.models.hf_folder import is_megatron_folder
from fusionrl.models.shape import ModelShape, read_model_shape
from fusionrl.models.trainable import AdapterSpec
from fusionrl.observe.spans import phase, span
from fusionrl.plan.trained_parts import adapted_of, adapter_folders, adapters_of, frozen_of
from fusionrl.plan.trainer_plan import TrainerPlan

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer import TransformerConfig

    from fusionrl.trainer.checkpoint import Saving
    from fusionrl.trainer.checkpoint_io import WriterProcess
    from fusionrl.trainer.host_memory import Offload, WeightSet
    from fusionrl.trainer.model import Trained
    from fusionrl.trainer.train_hooks import TrainHooks


# On a CPU, of what a step frees: the next one takes it again, and does not wait for the system to map it.
_KEPT_BYTES = 2**30


class SetupFacts(TypedDict):
    """Facts of a rank that is set up: parameters of the whole model, "local" or "transformer_engine", …"""

    num_parameters: int
    device: str
    impl: str
    precision: str


class Restored(TypedDict):
    """Facts of a checkpoint that a rank has loaded.

    rng_restored  False if the checkpoint has another layout
    hashes        with --verify-checkpoints, as `state_hashes` gives them, of the state as it was saved
    """

    rollout_id: int
    optimizer_steps: int
    skipped: int
    rng_restored: bool
    hashes: NotRequired[dict[str, str]]


class ModelRank:
    """A rank of a group of trainers; the base of every trainer.

    Its methods are collectives, if they do not say otherwise: the driver calls them on all ranks at once.

    `device_id`: GPU of this rank as its process numbers them, from the placement; without one, ranks go round them.
    """

    role: ClassVar[Role | None] = None

    def __init__(
        self, config: Config, plan: TrainerPlan, rank: int, run_dir: str, device_id: int | None = None
    ) -> None:
        self.config, self.trainer_plan, self.rank, self.run_dir = config, plan, rank, run_dir
        self.layout = plan.layout
        self.device: torch.device
        self.shape: ModelShape
        self.trained: Trained
        self.weight_sets: dict[str, WeightSet] = {}
        self.counters = {"rollout_id": -1, "optimizer_steps": 0, "skipped": 0}
        self._device_id = device_id
        self._offload: Offload | None = None
        self._writer: WriterProcess | None = None
        self._saving: Saving | None = None
        register_hooks(vars(config.to_args()))  # shards may hold objects of classes in hooks' files

    @property
    def hooks(self) -> TrainHooks:
        """A user's functions."""
        from fusionrl.trainer.train_hooks import TrainHooks

        return TrainHooks(self.config, self.rank, self.run_dir, self.trainer_plan.answers)

    def read_shape(self) -> ModelShape:
        """The shape of the model that is trained."""
        if self.config.model.hf_checkpoint is None:
            raise ValueError("--hf-checkpoint is not given; the trainer reads the model's shape and weights from it")
        sees, train = sees_images(self.config) and self.role is None, self.config.train
        shape = read_model_shape(self.config.model.hf_checkpoint, sees=sees)
        return shape.with_mtp(train.mtp_num_layers or 1) if train.enable_mtp_training and self.role is None else shape

    @property
    def frozen(self) -> frozenset[str]:
        """Megatron names of the parameters that are not trained."""
        return frozen_of(self.config, self.shape)

    @property
    def adapter_spec(self) -> AdapterSpec | None:
        """The adapters that are trained; None: the weights are."""
        return adapters_of(self.config, self.shape)

    @phase("setup")
    def setup(self, master_addr: str, master_port: int) -> SetupFacts:
        """Join the other ranks, build the model from --hf-checkpoint, its optimizer and its schedule.

        The ranks meet in the store at this address, which `create_group_store` made. Raises ValueError, which names it,
        for a checkpoint or a flag that does not fit.
        """
        config = self.config
        if config.checkpoint.async_save and not config.checkpoint.no_save:
            from fusionrl.trainer.checkpoint_io import WriterProcess

            self._writer = WriterProcess()
        modules, transformer = self.setup_model(master_addr, master_port)
        from fusionrl.trainer.megatron_core import record_megatron
        from fusionrl.trainer.model import build_training, freeze

        if self.frozen:
            freeze(modules, self.shape, self.frozen)
        watch = None
        if self.adapter_spec is not None:
            from fusionrl.trainer.lora import GradientWatch, attach

            folders = list(adapter_folders(config).values())  # several adapters take turns, each with its own start
            only = folders[0] if len(folders) == 1 else None
            attach(modules, transformer, self.shape, self.adapter_spec, config.run.seed, only)
            watch = GradientWatch()
        self.trained = build_training(config, modules, transformer, self.trainer_plan, watch, self.role)
        record_megatron(self.trained, self.device)
        give_freed_back()  # the files of the weights, as they were read
        return {
            "num_parameters": self.shape.num_parameters,
            "device": str(self.device),
            "impl": transformer.transformer_impl,
            "precision": self.trainer_plan.precision,
        }

    def setup_model(self, master_addr: str, master_port: int) -> tuple[list[torch.nn.Module], TransformerConfig]:
        """Join the other ranks and read this rank's part of the model: for conversion that is all.

        Returns and raises as `build_model`, and raises as `setup`.
        """
        with without_collections():
            import torch

            from fusionrl.trainer import process_groups, settings

        config, plan = self.config, self.trainer_plan
        self.shape = self.read_shape()
        self.device = settings.rank_device(plan, self.rank, self._device_id)
        torch.set_num_threads(plan.num_threads)
        if self.device.type == "cpu":
            keep_freed(_KEPT_BYTES)
        if config.run.bitwise:
            settings.start_bitwise(self.device)
        process_groups.join_ranks(
            plan.layout,
            self.rank,
            self.device,
            (master_addr, master_port),
            seed=config.run.seed,
            timeout_minutes=config.cluster.distributed_timeout_minutes,
        )
        self.hooks.initialized()
        with without_collections():
            from fusionrl.models.hf_io import load_hf
            from fusionrl.trainer import model

        modules, transformer = model.build_model(config, self.shape, plan, self.device)
        if config.model.debug_random_weights:
            model.randomize(modules)
        elif config.model.megatron_checkpoint is not None:
            from fusionrl.trainer.checkpoint import load_weights

            load_weights(config.model.megatron_checkpoint, modules)
        else:
            assert config.model.hf_checkpoint is not None, "read_shape has asked for it"
            load_hf(config.model.hf_checkpoint, modules, self.shape)
        return modules, transformer

    # ---------------------------------------------------------------------------- memory, and sets of weights
    @phase("offload")
    def offload(self, keep_weights: bool = False) -> int:
        """Give this rank's memory of weights, gradients and optimizer away until it is needed again. Returns bytes.

        Every other method takes back what it needs by itself.
        """
        from fusionrl.trainer.host_memory import Offload

        if self._offload is None:
            self._offload = Offload(self.trained, self.device, folder=self.config.cluster.offload_folder)
        return self._offload.offload(keep_weights=keep_weights)

    def reload(self, only_weights: bool = False) -> None:
        """Take the memory back that `offload` gave away; nothing to do if it is there."""
        if self._offload is not None:
            with span("reload"):
                self._offload.reload(only_weights=only_weights)

    def read_weights(self, name: str, folder: str, flag: str) -> None:
        """Keep the weights of a folder (Hugging Face's, or torch_dist) in host memory as the set `name`, for `score`.

        Raises ValueError, which names `flag`, if they are not of this model's shape.
        """
        from fusionrl.models.hf_io import read_local_weights
        from fusionrl.trainer import checkpoint
        from fusionrl.trainer.host_memory import WeightSet

        if not is_megatron_folder(folder):
            shape = read_model_shape(folder, flag, sees=self.shape.vision is not None)
            if (shape.with_value_head() if self.shape.value_head else shape) != self.shape.trunk:
                raise ValueError(f"{flag} {folder}: its config.json describes another shape than --hf-checkpoint's")
            self.reload()
            # Scoring needs no layers of multi-token prediction.
            tensors = read_local_weights(folder, self.trained.chunks, self.shape.trunk, flag)
            self.weight_sets[name] = WeightSet(tensors)
            return
        # It is read into the model, which then gets its weights back.
        self.keep_weights("current")
        checkpoint.load_weights(folder, self.trained.chunks, flag)
        self.weight_sets[name] = WeightSet.of_model(self.trained.chunks, self.shape)
        self.weight_sets.pop("current").put_back()

    def keep_weights(self, name: str) -> None:
        """Keep the weights that the model has now in host memory as the set `name`, for `score`."""
        from fusionrl.models.hf_io import gather_params
        from fusionrl.trainer.host_memory import WeightSet

        self.reload()
        gather_params(self.trained.chunks)
        if name in self.weight_sets:
            self.weight_sets[name].update()
        else:
            self.weight_sets[name] = WeightSet.of_model(self.trained.chunks, self.shape)

    # ------------------------------------------------------------------------------------------- checkpoints
    def last_trained(self) -> int | None:
        """Return the last rollout that the weights have learned completely; None between two optimizer steps of one.

        Not a collective. Returns once the device is idle, so never while this rank waits for another.
        """
        import torch

        torch.cuda.synchronize()
        return None if self.trained.is_amid else self.counters["rollout_id"]

    @phase("save")
    def begin_save(self, path: str, rollout_id: int) -> None:
        """Settle what a checkpoint at `path` holds; with --async-save a process of this rank writes it from now on.

        A save that is under way is finished first.
        """
        from fusionrl.trainer import checkpoint

        self.reload()
        self.finish_save()
        counters = self.counters | {"rollout_id": rollout_id}
        place, adapted = (self.layout, self.shape, self.rank), adapted_of(self.config, self.shape)
        self._saving = checkpoint.begin_save(path, self.trained, *place, counters, self._writer, adapted)

    def is_saved(self) -> bool:
        """Return whether `finish_save` would return at once, as far as this rank goes. Not a collective."""
        return self._saving is None or self._saving.is_done()

    @phase("finish save")
    def finish_save(self) -> None:
        """Publish the checkpoint that `begin_save` began, complete or not at all; nothing to do without one.

        Raises OSError if a rank could not write its files.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            with nullcontext() if self._offload is None else self._offload.connected():
                saving.finish()

    def save(self, path: str, rollout_id: int) -> None:
        """Write a checkpoint at `path`, complete or not at all (see `checkpoint.py`)."""
        self.begin_save(path, rollout_id)
        self.finish_save()

    @phase("restore")
    def load(self, path: str) -> Restored:
        """Restore weights, optimizer, RNG, counters and the position in the schedule.

        The schedule itself and the optimizer's options are those of the flags. Raises ValueError if no complete
        checkpoint of this model is at `path`.
        """
        from fusionrl.trainer import checkpoint

        self.reload()
        groups = self.trained.optimizer.param_groups
        # All of a group but its parameters and steps follows from flags, which a resume may change: --lr, say.
        options = [{name: value for name, value in g.items() if name not in ("params", "step")} for g in groups]
        adapted = adapted_of(self.config, self.shape)
        loaded = checkpoint.load(path, self.trained, self.layout, self.shape, self.rank, adapted)
        self.counters = {name: int(loaded[name]) for name in self.counters}
        restored: Restored = {**self.counters, "rng_restored": bool(loaded["rng_restored"])}  # type: ignore[typeddict-item]
        if self.config.checkpoint.verify_checkpoints:
            # Before the flags, which may give another rate than was saved.
            restored["hashes"] = checkpoint.state_hashes(self.trained, self.adapter_spec)
        for group, of_flags in zip(self.trained.optimizer.param_groups, options, strict=True):
            group.update(of_flags)
        self.trained.scheduler.step(0)  # the rates of this position, by the schedule of the flags
        return restored

    @phase("save hf")
    def save_hf(self, path: str) -> None:
        """Write the weights as a Hugging Face folder, with the other files of --hf-checkpoint; adapters as PEFT's.

        Raises ValueError if `path` is there already.
        """
        import torch.distributed as dist

        from fusionrl.models import families
        from fusionrl.models.hf_io import iter_hf_tensors
        from fusionrl.models.hf_save import save_hf, write_peft

        self.reload()
        source, spec = self.config.model.hf_checkpoint, self.adapter_spec
        assert source is not None
        tensors = iter_hf_tensors(self.trained.chunks, self.trained.transformer, self.shape, adapters=spec)
        if spec is None:
            save_hf(path, source, tensors, write=self.rank == 0, kept=families.kept(self.shape))
        else:
            write_peft(path, spec, self.shape, source, tensors, write=self.rank == 0)
        dist.barrier()

    def state_hashes(self) -> dict[str, str]:
        """SHA-256 of this rank's weights, optimizer state and RNG states: equal only where all bits are."""
        from fusionrl.trainer.checkpoint import state_hashes

        self.reload()
        return state_hashes(self.trained, self.adapter_spec)

    def shutdown(self) -> None:
        """Leave the process groups. A save that was not finished is not published."""
        from fusionrl.trainer.process_groups import leave_ranks

        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if hasattr(self, "trained"):
            from fusionrl.trainer.model import take_apart

            take_apart(self.trained)
            del self.trained
            self.weight_sets, self._offload, self._saving = {}, None, None
            gc.collect()
            give_freed_back()
        leave_ranks()
