"""The limit of open files: each request under way is a connection, and a connection is an open file."""

import resource

_MOST = 1 << 20
"""Linux opens no more by default (fs.nr_open), and programs that walk all numbers up to a larger limit take minutes."""


def most_open_files() -> int:
    """Return how many files a process may open, once it has raised its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = _MOST
    return max(soft, min(hard, _MOST))


def raise_open_files() -> int:
    """Raise this process's limit, and that of processes that it starts, as far as it may go; returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = most_open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
