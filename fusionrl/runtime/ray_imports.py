"""Packages that Ray's modules import; Ray itself is imported when the first worker is asked for (`worker_fork.py`).

The nursery imports this while there is no cluster yet: so less is left to do between the first request and its fork.
"""

from __future__ import annotations

import contextlib
import importlib

NEEDS = (
    *("jsonschema", "yaml", "wcwidth", "filelock", "tqdm.auto", "uvloop", "msgpack", "psutil"),
    *("google.protobuf.internal.builder", "google.protobuf.json_format", "google.protobuf.timestamp_pb2"),
    *("logging.handlers", "multiprocessing", "packaging.version", "pdb", "tarfile"),
)
WHEN_IT_ANSWERS = ("pydantic.v1", "starlette.concurrency", "starlette.datastructures")
"""What a worker imports for its first argument or answer, but for pyarrow, which starts a thread."""
for name in (*NEEDS, *WHEN_IT_ANSWERS, "numpy.random"):  # a fork seeds the last one
    with contextlib.suppress(ImportError):  # another version of Ray does without it
        importlib.import_module(name)
