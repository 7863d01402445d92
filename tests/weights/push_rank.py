"""A rank of `LocalRanks` that pushes: `Pusher(pool, rank)` has the methods that the protocol calls on a trainer."""

from typing import Any

from tests.trainer.local_ranks import LocalRanks


def _sender(actor: Any, buffer_size: int, timeout_s: float) -> Any:
    import torch.distributed as dist

    from fusionrl.weights.gather import Exporter
    from fusionrl.weights.send import WeightSender

    if not hasattr(actor, "sender"):
        trained, device = actor.trained, actor.device
        place = actor.shape, actor.layout, actor.rank, "float32", device
        exporter = Exporter(trained.chunks, trained.transformer, *place, merged=actor.adapter_spec)
        settings = {"device": "cpu", "backend": "gloo", "host": "127.0.0.1", "buffer_size": buffer_size}
        group = dist.new_group(backend="gloo")
        actor.sender = WeightSender(
            rank=actor.rank, exporter=exporter, timeout_s=timeout_s, object_group=group, **settings
        )
    return actor.sender


def prepare(actor: Any, buffer_size: int, timeout_s: float, *args: Any) -> None:
    _sender(actor, buffer_size, timeout_s).prepare(*args)


def send(actor: Any, *args: Any) -> dict[str, Any]:
    return actor.sender.send(*args)


def checksums(actor: Any) -> dict[str, str]:
    """Return the checksums that an engine of one rank should have."""
    from fusionrl.weights.checksums import CPU_MULTIPLE, engine_checksums, hash_tensor

    return engine_checksums(actor.sender.exporter.full(), actor.shape, 1, hash_tensor, CPU_MULTIPLE)[0]


class Pusher:
    """For `Threaded`."""

    def __init__(self, pool: LocalRanks, rank: int, buffer_size: int, timeout_s: float) -> None:
        self.pool, self.rank, self.buffer_size, self.timeout_s = pool, rank, buffer_size, timeout_s

    def prepare_push(self, *args: Any) -> None:
        self.pool.run_on(self.rank, prepare, self.buffer_size, self.timeout_s, *args)

    def push_weights(self, *args: Any) -> dict[str, Any]:
        return self.pool.run_on(self.rank, send, *args)
