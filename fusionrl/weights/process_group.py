"""Process groups between a trainer rank and SGLang's ranks, outside the trainer's default group.

On the engine's side, `/init_weights_update_group`, every rank opens the store at the given address, puts the group's
name as a prefix before its keys, and makes a group from it with torch's constructor. torch has no public call for a
second, independent group, so both sides use the constructor behind `init_process_group` of the installed torch.
"""

import inspect
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fusionrl.base.group_rendezvous import connecting, meet


def init_external_group(
    backend: str, store: dist.Store, world_size: int, rank: int, group_name: str, timeout_s: float
) -> dist.ProcessGroup:
    """Join the group `group_name`; blocks until all `world_size` ranks have. Its communicator is there afterwards.

    `store` is the one that `fusionrl.base.torch_stores.create_group_store` made on rank 0. `timeout_s` bounds the
    meeting, which may be called off (`fusionrl.base.group_rendezvous`), and every later collective.
    """
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    meet(store, rank, world_size, timeout_s)
    # torch 2.6 renamed the argument.
    parameters = inspect.signature(c10d._new_process_group_helper).parameters
    options = "backend_options" if "backend_options" in parameters else "pg_options"
    group, _ = connecting(c10d._new_process_group_helper)(
        world_size,
        rank,
        [],  # no ranks of a default group: the group stands alone
        c10d.Backend(backend),
        dist.PrefixStore(group_name, store),
        group_name=group_name,
        timeout=timeout,
        **{options: None},
    )
    # Collectives translate a global rank into the group's; here they are the same.
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group
