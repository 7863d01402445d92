"""The processes that Ray starts for a local cluster: only those that a run uses, in groups of their own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from ray._private import services
from ray._private.node import Node

_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Starters of the autoscaler, of what prints actors' output in the driver, and of the dashboard's server."""


@contextmanager
def only_what_is_used(dashboard: bool) -> Iterator[None]:
    """Start Ray without the processes that a run does not use; with `dashboard`, start all of them.

    The cluster has one node, actors write their own logs, and without a dashboard its server only collects usage
    statistics. Ray has no options for it. They cost 2 s of a core, and `ray.init` waits for the server.
    """
    names = [] if dashboard else [name for name in _UNUSED if hasattr(Node, name)]
    usual = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, starter in usual.items():
            setattr(Node, name, starter)


def _start_nothing(node: Node, **options: object) -> None:
    pass


@contextmanager
def in_own_groups() -> Iterator[None]:
    """Start Ray's processes in process groups of their own.

    `timeout`, a shell or a scheduler sends SIGTERM to the command's whole group. The command hears it and ends Ray; a
    Ray that is dead by then lets each of the command's calls wait for a minute.
    """
    usual = services.ConsolePopen
    services.ConsolePopen = functools.partial(usual, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = usual
