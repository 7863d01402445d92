"""Connect SGLang's ranks to each other and to the trainers without a TCPStore that strangers can write to.

SGLang meets at `tcp://host:port`: its own ranks when it starts, and with a trainer when it joins a group for a weight
push. `install` replaces torch's handler of that scheme in the server's processes:

* SGLang's own ranks, which are on one machine, meet in a file of the engine's temporary folder;
* a trainer is met in the store that it made (`fusionrl.base.stores`): a file, or a TCPStore on another node.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlparse


def install() -> None:
    """Replace the handler; imports torch. Idempotent."""
    import torch.distributed  # noqa: F401

    # `torch.distributed.rendezvous` is the function of that name.
    sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["tcp"] = _meet


def _meet(url: str, timeout: timedelta = timedelta(minutes=30), **_: object) -> Iterator[tuple[object, int, int]]:
    import torch.distributed as dist

    from fusionrl.base.stores import join_group_store

    address = urlparse(url)
    query = {name: int(values[0]) for name, values in parse_qs(address.query).items() if name in ("rank", "world_size")}
    assert address.hostname is not None and address.port is not None
    if dist.is_initialized():  # then it is not SGLang's own world
        store = join_group_store(address.hostname, address.port, timeout.total_seconds())
    else:
        folder = os.environ.get("TMPDIR", tempfile.gettempdir())  # the engine's own, see `EngineActor`
        store = dist.FileStore(str(Path(folder, f"world-{address.port}")), query["world_size"])
        store.set_timeout(timeout)
    yield store, query["rank"], query["world_size"]
