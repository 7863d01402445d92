"""Bounds of one run in the sandbox, and its result."""

from dataclasses import asdict, dataclass


class SandboxError(RuntimeError):
    """The sandbox itself failed: it could not be set up, or it ended without a report."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one run; bytes and seconds. `num_processes` also counts threads, like RLIMIT_NPROC."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """Of each process."""
    memory_bytes: int = 1 << 30
    """Address space of each process, and memory of all of them together with the files that they write."""
    output_bytes: int = 64 << 10
    """Of stdout and of stderr each; what is beyond is read and dropped."""
    file_bytes: int = 16 << 20
    """Of one file."""
    disk_bytes: int = 64 << 20
    """Of all files together. Without namespaces a watch measures it, and only in the run's own folder."""
    num_files: int = 1000
    """Files and folders in existence."""
    open_files: int = 256
    num_processes: int = 64
    namespaces: bool = True
    """Off: weak mode, and do not even try them."""
    cgroup: bool = True
    """Off: bound the memory of all processes together by the watch, even where a memory cgroup could be made."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, bool) and value <= 0:
                raise ValueError(f"sandbox limit {name}={value}: it must be positive")


@dataclass(frozen=True)
class SandboxResult:
    """Output and end of a run."""

    stdout: str
    stderr: str
    """Cut at `Limits.output_bytes`, the last line saying so."""
    answer: bytes
    """Bytes written to descriptor 3, at most as many as the caller requested."""
    exit_code: int | None
    """Minus the signal's number where a signal ended it; None where the sandbox did."""
    timed_out: bool
    """The wall time ran out."""
    killed_by: str | None
    """"wall time", "CPU time", "memory", "disk" or the name of a signal; None where the code ended itself."""
    stdout_cut: bool
    stderr_cut: bool
    answer_cut: bool
    wall_s: float
    mode: str
    """"namespaces" or "weak"."""
    landlock: int
    """Version of Landlock that hid files; 0: none, or not needed."""
    memory: str
    """The bound on the memory of all processes: "cgroup" or "watch"."""

    @property
    def ok(self) -> bool:
        """Return whether the code ended itself with exit code 0."""
        return self.exit_code == 0
