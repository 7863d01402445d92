"""Imports that the nursery makes for workers before the cluster exists: packages that Ray needs, and a tokenizer.

Ray itself is imported for the first worker (`worker_fork.py`).
"""

import contextlib
import importlib

from fusionrl.data.tokenizer import import_auto_tokenizer

NEEDS = (
    *("jsonschema", "yaml", "wcwidth", "filelock", "tqdm.auto", "uvloop", "msgpack", "psutil"),
    *("google.protobuf.internal.builder", "google.protobuf.json_format", "google.protobuf.timestamp_pb2"),
    *("logging.handlers", "multiprocessing", "packaging.version", "pdb", "tarfile"),
)
WHEN_IT_ANSWERS = ("pydantic.v1", "starlette.concurrency", "starlette.datastructures")
"""Imports of a worker for its first argument or answer, except pyarrow, which starts a thread."""
for name in (*NEEDS, *WHEN_IT_ANSWERS, "numpy.random"):  # a fork seeds the last one
    with contextlib.suppress(ImportError):  # another version of Ray does without it
        importlib.import_module(name)


import_auto_tokenizer()
