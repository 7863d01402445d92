"""Cures of the system's errors, which say none themselves: what is used up, how to see it, and what gives more."""

import errno
import os
from dataclasses import dataclass

_RESUME = "--resume continues from the last checkpoint"


@dataclass(frozen=True)
class Cure:
    """A cure of these errors of the system, also where a library or a rank wrapped their texts; or of other `texts`."""

    codes: tuple[int, ...]
    cure: str
    texts: tuple[str, ...] = ()
    in_logs: bool = True  # of several lines, the end of a log may name it, too

    def fits(self, error: BaseException) -> bool:
        """Return whether it cures this error."""
        text = str(error) if self.in_logs else str(error).partition("\n")[0]
        is_one = isinstance(error, OSError) and error.errno in self.codes
        return is_one or any(known in text for known in (*map(os.strerror, self.codes), *self.texts))


# Of several that fit, the first is printed.
CURES = (
    Cure(
        (errno.ENOSPC, errno.EDQUOT),
        "a disk is full: look at `df -h` of the run's folder, --save-hf and TMPDIR (Ray's objects: RAY_TMPDIR); free"
        f" some, or keep fewer checkpoints (--keep-checkpoints 2); {_RESUME}",
        ("Local disk is full",),
    ),
    Cure(
        (errno.EROFS,),
        "a file system is read-only: the kernel makes it so after an error of its disk (`dmesg`), or it was mounted so"
        f" (`findmnt -T FOLDER`); once it can be written, {_RESUME}",
    ),
    Cure((errno.EIO, errno.ESTALE), f"a disk, or the network to it, fails: look at `dmesg`; once it works, {_RESUME}"),
    Cure((errno.ENFILE,), f"the machine may open no more files: raise `sysctl fs.file-max`; {_RESUME}"),
    Cure(
        (errno.EMFILE,),
        "a process may open no more files: raise the hard limit (`ulimit -Hn 65536` before the shell starts, docker run"
        f" --ulimit nofile=65536), or ask for fewer samples at once (--sglang-server-concurrency); {_RESUME}",
    ),
    Cure(
        (),
        "no more processes or threads are allowed (`ulimit -u`, docker run --pids-limit=-1), or memory has no room for"
        f" one (`free -g`): raise the limit, or let fewer programs run; {_RESUME}",
        ("can't start new thread", "Resource temporarily unavailable"),
    ),
    Cure(
        (),
        "a GPU's memory is full: give fewer tokens at once (--max-tokens-per-gpu), or the engines that share it less"
        f" (--sglang-mem-fraction-static); `fusionrl plan` estimates what each process needs; {_RESUME}",
        ("CUDA out of memory", "CUDA error: out of memory"),
    ),
    Cure(
        (errno.ENOMEM,),
        "memory is full: look at `free -g` and at the limit of the container or job; give fewer tokens at once"
        f" (--max-tokens-per-gpu), or fewer processes; `fusionrl plan` estimates what each needs; {_RESUME}",
        ("bad_alloc", "MemoryError"),
    ),
    Cure(
        (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET, errno.ECONNREFUSED),
        "the network between two processes of the run fails, or one of them is gone: logs/ says who has the address;"
        f" `fusionrl doctor` with the run's flags checks that nodes reach each other; {_RESUME}",
        in_logs=False,
    ),
)


def cure_of(error: BaseException) -> str:
    """Return a line with the cure of an error, and the line break before it; "" if none is known."""
    from fusionrl.config.user_code import HookError  # not at the start: its room imports numpy

    is_memory = isinstance(error, MemoryError)  # Python's and numpy's name no code
    # A user's function has connections of its own.
    cures = [cure for cure in CURES if not isinstance(error, HookError) or errno.ECONNREFUSED not in cure.codes]
    known = (cure for cure in cures if cure.fits(error) or (is_memory and errno.ENOMEM in cure.codes))
    cure = next(known, None)
    return "" if cure is None else f"\n{cure.cure}"
