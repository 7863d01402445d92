"""The kernels of `kernels.c` as a library, compiled on the user's machine and kept in the user's cache folder.

A file there is valid for these sources, this compiler and a CPU with these instructions, so machines that share a home
folder have a file each. Its last bytes are the digest of the others: a file that was cut off is compiled again, and
never loaded.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from fusionrl.base.environment import child_environment
from fusionrl.base.files import cache_folder, file_fact, open_kept, write_bytes

SOURCE = Path(__file__).with_name("kernels.c")
# Sums may be vectorised where the source says so, and nowhere else: NaN and infinities travel as in torch.
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-shared", "-fPIC")
COMPILE_LIMIT_S = 300.0  # it takes two seconds; a machine that swaps was seen to take over 60
SWITCH = "FUSIONRL_CPU_KERNELS"
"""Environment variable: 0 leaves all of this to torch."""
_DIGEST_BYTES = hashlib.sha256().digest_size

logger = logging.getLogger(__name__)


class CompileError(Exception):
    """The kernels cannot be compiled or loaded here; the text says why."""


def load() -> ctypes.CDLL:
    """Load the library, and compile it if it is not there. Raises CompileError if it cannot be had here."""
    if os.environ.get(SWITCH) == "0":
        raise CompileError(f"{SWITCH}=0")
    names = dict.fromkeys(filter(None, (os.environ.get("CC"), "cc", "gcc")))
    compilers = [path for path in map(shutil.which, names) if path is not None]
    if not compilers:
        raise CompileError("no C compiler: install gcc")
    reasons = []
    for compiler in compilers:
        try:
            return _load(compiler)
        except CompileError as error:
            reasons.append(f"{compiler}: {error}")
        except (OSError, RuntimeError) as error:  # of the cache folder, for which no other compiler helps
            raise CompileError(str(error)) from error
    raise CompileError("; ".join(reasons))


def _load(compiler: str) -> ctypes.CDLL:
    path = _path(compiler)
    library = _kept(path)
    if library is None:
        code = _compiled(compiler)
        write_bytes(path, code + hashlib.sha256(code).digest())
        library = _kept(path)
    if library is None:
        # On some network file systems a new file belongs to another user, and it would be compiled at every start.
        raise PermissionError(f"{path} is not this user's alone, or was not written whole")
    return library


def _kept(path: Path) -> ctypes.CDLL | None:
    """Return the library in a complete file that only this user may write, if there is one."""
    try:
        with open_kept(path) as file:
            code = file.read()
            if hashlib.sha256(code[:-_DIGEST_BYTES]).digest() != code[-_DIGEST_BYTES:]:
                return None
            return ctypes.CDLL(f"/proc/self/fd/{file.fileno()}")  # the very file that was looked at
    except OSError:
        return None


def _path(compiler: str) -> Path:
    resolved = Path(compiler).resolve()
    facts = (SOURCE.read_text(), *FLAGS, file_fact(resolved, resolved.stat()), platform.machine(), _instructions())
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]
    return cache_folder() / f"kernels-{digest}.so"


def _instructions() -> str:
    """Return the CPU's instructions as Linux names them; "" where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compiled(compiler: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="fusionrl-") as folder:  # for this user alone
        new = Path(folder) / "kernels.so"
        # The compiler starts others, which end with it: they are a process group of their own.
        process = subprocess.Popen(
            [compiler, *FLAGS, "-o", str(new), str(SOURCE), "-lm"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=child_environment("compiler"),
            start_new_session=True,
        )
        try:
            _, output = process.communicate(timeout=COMPILE_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise CompileError(f"did not end within {COMPILE_LIMIT_S:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode != 0:
            raise CompileError(f"exit status {process.returncode}: {output.decode(errors='replace').strip()[-500:]}")
        return new.read_bytes()
