"""Versions of the weights as files: what the trainers write for engines that read from a disk.

    <folder>/weight_v000003/        there as a whole or not at all
        manifest.json               see `Manifest`; what reads the version begins with it
        part-00000.safetensors ...  full: a Hugging Face folder with index and config; delta: each changed tensor's
                                    change (`fusionrl.engines.disk_versions`) as an array of bytes
        not-trained.safetensors     full, of a multimodal model: what does not belong to the text model

A delta is against the version that was written before it. Its trainers keep that one in host memory, in the engines'
precision: each rank the tensors that it writes.
"""

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from fusionrl.engines.disk_versions import MANIFEST, Change, Encoding, Manifest, checksum_of, encode
from fusionrl.models.hf_folder import INDEX
from fusionrl.models.hf_save import copy_companions, published_reader, untrained_tensors
from fusionrl.weights.gather import buckets, of_all_ranks
from fusionrl.weights.remote_calls import WriteReport

_UNTRAINED = "not-trained.safetensors"
_WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass(frozen=True)
class DiskOptions:
    """The flags that say how versions are written."""

    folder: str
    source: str  # --hf-checkpoint, whose config goes with a full version
    keeps_base: bool  # --update-weight-mode delta
    encoding: Encoding
    checksum: str
    max_bytes: int  # of one file, at most (a larger tensor is alone in its file), and so of a rank's extra memory


@dataclass
class _Report:
    """The files that one rank has written."""

    files: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)  # file -> its tensors
    num_bytes: int = 0
    num_elements: int = 0
    num_changed: int = 0
    dtypes: set[str] = field(default_factory=set)
    error: str | None = None


@dataclass(eq=False)
class DiskWriter:
    """One trainer rank's writer. All ranks, which have the gloo group `group`, call each method together, but for
    `drop`. `export` yields (Hugging Face name, whole tensor) in the engines' precision, in one order on all ranks."""

    options: DiskOptions
    _: KW_ONLY
    rank: int
    world_size: int
    export: Callable[[], Iterator[tuple[str, Tensor]]]
    group: dist.ProcessGroup | None = None
    _state: str | None = field(default=None, init=False)  # of the base, where it is whole on every rank
    _base: dict[int, dict[str, Tensor]] = field(default_factory=dict, init=False)  # number of a file → tensors

    def write(self, version: int) -> WriteReport:
        """Write the weights as they are now: a delta where there is a base, else all of them.

        Returns the folder, bytes (of the files), files (their number) and density, the changed share of all elements.
        Raises OSError on every rank if one cannot write: then nothing is left of the version, and the next is full.
        """
        base, self._state = self._state, None  # what fails below leaves some tensors old and some new
        report = _Report()
        state, partial, folder = self._begin(version, "")
        for number, bucket in enumerate(buckets(self.export(), self.options.max_bytes)):
            # A rank that has failed still takes part in the export, in which the others may wait for it.
            if number % self.world_size != self.rank or report.error is not None:
                continue
            try:
                if base is None:
                    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in bucket}
                    self._write_full(partial, number, copies, report)
                else:
                    self._write_delta(partial, number, bucket, report)
            except OSError as error:
                report.error = str(error)
        result = self._publish(version, state, base, partial, folder, report)
        self._state = state if self.options.keeps_base else None
        return result

    def write_full(self, version: int) -> WriteReport:
        """After a delta: write the same weights in full, from the base, for engines that lack what it is against.

        Returns and raises as `write`.
        """
        assert self._state is not None, "there is no delta to stand in for"
        report = _Report()
        _, partial, folder = self._begin(version, "_full")
        try:
            for number, tensors in self._base.items():
                self._write_full(partial, number, tensors, report)
        except OSError as error:
            report.error = str(error)
        return self._publish(version, self._state, None, partial, folder, report)

    def drop(self, keep: int | None) -> None:
        """Remove the folders of all versions but `keep`, also what an attempt before this one has left."""
        for folder in Path(self.options.folder).glob("weight_v*"):
            if keep is None or not folder.name.startswith(_name(keep)):
                shutil.rmtree(folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------ files
    def _write_full(self, partial: Path, number: int, tensors: dict[str, Tensor], report: _Report) -> None:
        name = f"part-{number:05d}.safetensors"
        self._write_file(partial / name, tensors, report)
        report.names[name] = list(tensors)
        report.dtypes |= {str(tensor.dtype) for tensor in tensors.values()}
        count = sum(tensor.numel() for tensor in tensors.values())
        report.num_elements += count
        report.num_changed += count
        if self.options.keeps_base:
            self._base[number] = tensors

    def _write_delta(self, partial: Path, number: int, bucket: list[tuple[str, Tensor]], report: _Report) -> None:
        name, bases = f"part-{number:05d}.safetensors", self._base[number]
        assert list(bases) == [tensor_name for tensor_name, _ in bucket], "the export's order has changed"

        def encode_one(named: tuple[str, Tensor]) -> tuple[bytes, int, str]:
            base, new = bases[named[0]], named[1].detach().to("cpu")
            payload, num_changed = encode(words_of(base), words_of(new), self.options.encoding)
            base.copy_(new)
            return payload, num_changed, checksum_of(words_of(base), self.options.checksum) if num_changed else ""

        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:  # NumPy and zstd let go of the GIL
            encoded = list(pool.map(encode_one, bucket))
        payloads = {}
        for (tensor_name, tensor), (payload, num_changed, checksum) in zip(bucket, encoded, strict=True):
            report.num_elements += tensor.numel()
            report.num_changed += num_changed
            if num_changed:
                payloads[tensor_name] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                report.changes[tensor_name] = Change(name, num_changed, checksum)
        if payloads:
            self._write_file(partial / name, payloads, report)

    def _write_file(self, path: Path, tensors: dict[str, Tensor], report: _Report) -> None:
        data = save(tensors, metadata={"format": "pt"})
        path.write_bytes(data)
        report.files[path.name] = checksum_of(data, self.options.checksum)
        report.num_bytes += len(data)

    # ------------------------------------------------------------------------------------ all ranks
    def _begin(self, version: int, suffix: str) -> tuple[str, Path, Path]:
        """A new state's name, the folder to write in, and what it is called in the end."""
        folder = Path(self.options.folder, _name(version) + suffix)
        partial = folder.with_name(folder.name + ".partial")
        state, error = uuid.uuid4().hex, None
        if self.rank == 0:
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            except OSError as failure:
                error = str(failure)
        first_state, first_error = of_all_ranks((state, error), self.world_size, self.group)[0]
        self._raise([first_error])
        return first_state, partial, folder

    def _publish(
        self, version: int, state: str, base: str | None, partial: Path, folder: Path, report: _Report
    ) -> WriteReport:
        reports = of_all_ranks(report, self.world_size, self.group)
        errors = [rank_report.error for rank_report in reports]
        if self.rank == 0:
            try:
                if set(errors) == {None}:
                    self._finish(version, state, base, partial, folder, reports)
            except OSError as failure:
                errors[0] = str(failure)
            if set(errors) != {None}:
                shutil.rmtree(partial, ignore_errors=True)
        self._raise(of_all_ranks(errors, self.world_size, self.group)[0])
        elements = sum(rank_report.num_elements for rank_report in reports)
        return {
            "folder": str(folder),
            "bytes": sum(rank_report.num_bytes for rank_report in reports),
            "files": sum(len(rank_report.files) for rank_report in reports),
            "density": sum(rank_report.num_changed for rank_report in reports) / elements,
        }

    def _finish(
        self, version: int, state: str, base: str | None, partial: Path, folder: Path, reports: list[_Report]
    ) -> None:
        """On rank 0: what goes with the weights, the manifest, and the folder's own name."""
        files = {name: checksum for rank_report in reports for name, checksum in rank_report.files.items()}
        unseen = sorted(name for name in files if not (partial / name).is_file())
        if unseen:
            raise OSError(f"{unseen[0]} of another trainer is not there: the folder is not shared by their nodes")
        if base is None:
            weight_map = {
                name: file for rank_report in reports for file, names in rank_report.names.items() for name in names
            }
            reader = published_reader(self.options.source)
            if untrained := dict(untrained_tensors(reader, weight_map)) if reader is not None else {}:
                (partial / _UNTRAINED).write_bytes(save(untrained, metadata={"format": "pt"}))
                weight_map |= dict.fromkeys(untrained, _UNTRAINED)
            (partial / INDEX).write_text(
                json.dumps({"metadata": {}, "weight_map": weight_map}) + "\n", encoding="utf-8"
            )
            # Some tensors are in fp32 next to those of the model's type.
            dtypes = {dtype for rank_report in reports for dtype in rank_report.dtypes} - {"torch.float32"}
            dtype = min(dtypes, default="torch.float32")
            copy_companions(Path(self.options.source), partial, dtype.removeprefix("torch."))
            for path in partial.iterdir():
                if path.name not in files:
                    files[path.name] = checksum_of(path.read_bytes(), self.options.checksum)
        changes = {name: change for rank_report in reports for name, change in rank_report.changes.items()}
        manifest = Manifest(version, state, base, self.options.encoding, self.options.checksum, files, changes)
        (partial / MANIFEST).write_text(json.dumps(asdict(manifest)) + "\n", encoding="utf-8")
        if folder.exists():  # of a push that failed, or is made again
            shutil.rmtree(folder)
        partial.rename(folder)

    def _raise(self, errors: list[str | None]) -> None:
        for rank, error in enumerate(errors):
            if error is not None:
                raise OSError(
                    f"trainer rank {rank} could not write the weights into {self.options.folder}"
                    f" (--update-weight-disk-dir): {error}"
                )


def words_of(tensor: Tensor) -> np.ndarray:
    """The bit patterns of a host tensor's elements, [n] unsigned; in its memory where it is contiguous."""
    return tensor.contiguous().view(-1).view(_WORDS[tensor.element_size()]).numpy()


def _name(version: int) -> str:
    return f"weight_v{version:06d}"
