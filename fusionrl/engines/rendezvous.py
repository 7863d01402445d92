"""Connect SGLang's ranks to each other and to the trainers without a TCPStore that strangers can write to.

`install` replaces torch's handler of `tcp://host:port`, where SGLang meets, in the server's processes:

* SGLang's own ranks meet in a file of the engine's temporary folder; those of an engine over several nodes in a store
  of rank 0 that takes connections from the run's nodes alone;
* a trainer is met, for a weight push, in the store that it made (`fusionrl.base.group_stores`). All members of the
  group wait there for each other, and NCCL's communicator is made at once (`fusionrl.base.group_stores`).
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlparse

NODES_VARIABLE = "FUSIONRL_ENGINE_NODES"
"""Set in the servers of an engine over several nodes."""


def install() -> None:
    """Replace the handler, and the constructor of groups that SGLang calls; imports torch. Idempotent."""
    from torch.distributed import distributed_c10d as c10d

    from fusionrl.base.group_stores import connecting

    # `torch.distributed.rendezvous` is the function of that name.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    if handlers.get("tcp") is not _meet:
        handlers["tcp"] = _meet
        c10d._new_process_group_helper = connecting(c10d._new_process_group_helper)


def _meet(url: str, timeout: timedelta = timedelta(minutes=30), **_: object) -> Iterator[tuple[object, int, int]]:
    import torch.distributed as dist

    from fusionrl.base.group_stores import engine_store, join_group_store, meet

    address = urlparse(url)
    query = {name: int(values[0]) for name, values in parse_qs(address.query).items() if name in ("rank", "world_size")}
    assert address.hostname is not None and address.port is not None
    if dist.is_initialized():  # then it is not SGLang's own world
        store = join_group_store(address.hostname, address.port, timeout.total_seconds())
        meet(store, query["rank"], query["world_size"], timeout.total_seconds())
    elif NODES_VARIABLE in os.environ:
        is_master = query["rank"] == 0
        store = engine_store(address.hostname, address.port, timeout.total_seconds(), is_master=is_master)
    else:
        folder = os.environ.get("TMPDIR", tempfile.gettempdir())  # the engine's own, see `EngineActor`
        store = dist.FileStore(str(Path(folder, f"world-{address.port}")), query["world_size"])
        store.set_timeout(timeout)
    yield store, query["rank"], query["world_size"]
