"""Reads Megatron's checkpoint files without running code that they contain.

torch.distributed.checkpoint unpickles `.metadata`, and the objects among the shards, with everything that a pickle can
name: a prepared file runs any program. Within `only_data`, `.metadata` may name the classes of `_METADATA_CLASSES`, and
what torch.load reads those that it takes with weights_only, and numpy's arrays (of a random number generator's state).
"""

import pickle
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata

from fusionrl.base.files import plain_name

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "collections": {"OrderedDict"},
    # torch.distributed.checkpoint.save keeps the folder that it was given as checkpoint_id, perhaps a Path.
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}
_ARRAYS = [
    np.ndarray,
    np.dtype,
    np.empty(0).__reduce__()[0],  # numpy._core.multiarray._reconstruct
    *{type(np.dtype(kind)) for kind in ("u4", "i4", "i8", "u8", "f4", "f8", "b1")},
]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name in _METADATA_CLASSES.get(module, ()):
            # Python 3.13 alone has the module pathlib._local.
            return super().find_class("pathlib" if module == "pathlib._local" else module, name)
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint needs: it may run code")


def read_metadata(file: IO[bytes]) -> Metadata:
    """The content of `.metadata`, in place of `pickle.load`.

    Raises pickle.UnpicklingError if it names something else than a checkpoint's classes; ValueError if it is not the
    metadata of a checkpoint, or names a file outside of its folder.
    """
    metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(".metadata holds no metadata of a checkpoint")
    for place in metadata.storage_data.values():
        plain_name(getattr(place, "relative_path", None), ".metadata")
    return metadata


@contextmanager
def only_data() -> Iterator[None]:
    """Within it, this process's checkpoint files are read as said above."""
    before, torch_load = filesystem.pickle, torch.load

    def load(*args: object, **options: object) -> object:
        try:
            return torch_load(*args, **{**options, "weights_only": True})
        except pickle.UnpicklingError as error:  # its message is a page that advises to trust the file
            named = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "function" in line]
            raise pickle.UnpicklingError(
                f"it holds an object other than plain data ({(named or [''])[0][:200]})"
            ) from None

    # The functions of pickle that torch's module calls; `load` is the one that is not trusted.
    filesystem.pickle = types.SimpleNamespace(**{**vars(pickle), "load": read_metadata})
    torch.load = load
    try:
        with torch.serialization.safe_globals(_ARRAYS):
            yield
    finally:
        filesystem.pickle, torch.load = before, torch_load
