"""The adapter of a row of data, in a run with several (--lora-adapters)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusionrl.data.findings import Finding, FindingError
from fusionrl.data.sample import Sample


@dataclass(frozen=True)
class AdapterColumn:
    """The column that names the adapter of a row.

    key     of the row, or of its metadata
    names   of the run's adapters
    of_set  the adapter of rows that name none; None: each must name one
    """

    key: str
    names: tuple[str, ...]
    of_set: str | None = None

    @classmethod
    def of(cls, args: Namespace) -> AdapterColumn | None:
        """Return what the flags `args` say; None: the run has one adapter, or none."""
        names = tuple(spec.partition("=")[0] for spec in getattr(args, "lora_adapters", None) or ())
        return cls(args.adapter_key, names) if len(names) > 1 else None

    def adapter(self, row: Mapping[str, object], metadata: Mapping[str, object]) -> str:
        """Return the adapter of a row.

        Raises:
            FindingError: it names none, or one that the run does not have.
        """
        values = (row.get(self.key), metadata.get(self.key), self.of_set)
        value = next((value for value in values if value is not None), None)
        if isinstance(value, str) and value in self.names:
            return value
        hint = f"--lora-adapters has {', '.join(self.names)}"
        if value is None:
            cause = f"no adapter: column {self.key!r} (--adapter-key) is missing, and no adapter has the set's name"
            raise FindingError(Finding(cause, hint=hint))
        raise FindingError(Finding(f"column {self.key!r} (--adapter-key) names no adapter", repr(value)[:80], hint))


def check_adapter(sample: Sample, names: Sequence[str]) -> None:
    """Check that a sample names one of several adapters.

    Raises:
        ValueError: it names another one, or none.
    """
    if names and sample.adapter not in names:
        cure = f"set sample.adapter to one of --lora-adapters ({', '.join(names)})"
        raise ValueError(f"sample {sample.index} has the adapter {sample.adapter!r:.80}; {cure}")
