"""A watch on what all processes of a run use together, where no cgroup bounds it: it measures, the launcher kills.

It looks every `INTERVAL_S` seconds, so between two looks a run can be over its limit by what its processes can touch in
that time.
"""

import os

INTERVAL_S = 0.05
UNKNOWN = 1 << 62  # bytes: more than any limit
_FREE_DESCRIPTORS, _SOCKET_BYTES = 32, 208 << 10  # what is queued in a socket is nobody's memory: Linux's default bound


def descendants(of: int) -> list[int]:
    """Processes that descend from `of`, without itself."""
    descendants: list[int] = []
    waiting = [of]
    while waiting:
        children = _children(waiting.pop())
        descendants += children
        waiting += children
    return descendants


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children += map(int, file.read().split())
    except FileNotFoundError:
        if not os.path.exists(f"/proc/{pid}"):
            return []
        return _children_by_parent(pid)  # a kernel without CONFIG_PROC_CHILDREN
    except OSError:
        pass  # it ended
    return children


def _children_by_parent(parent: int) -> list[int]:
    children = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == parent:
                    children.append(int(name))
        except OSError:
            pass  # it ended
    return children


def memory_of(pids: list[int], limit: int) -> int:
    """Bytes of memory that the processes use together, shared pages counted once if it matters for `limit`."""
    total = sum(_resident(pid) + _queued(pid) for pid in pids)
    return total if total <= limit else sum(_proportional(pid) + _queued(pid) for pid in pids)


def _resident(pid: int) -> int:
    """Resident and swapped bytes, as everybody may read them."""
    return _sum_of(f"/proc/{pid}/status", ("VmRSS:", "VmSwap:"))


def _proportional(pid: int) -> int:
    """The same, each page divided by the number of processes that share it, where that may be read."""
    return _sum_of(f"/proc/{pid}/smaps_rollup", ("Pss:", "SwapPss:")) or _resident(pid)


def _sum_of(path: str, names: tuple[str, ...]) -> int:
    total = 0
    try:
        with open(path, errors="replace") as file:
            for line in file:
                if line.startswith(names):
                    total += int(line.split()[1]) << 10
    except OSError:
        pass  # it ended, or may not be read
    return total


def _queued(pid: int) -> int:
    try:
        return max(0, len(os.listdir(f"/proc/{pid}/fd")) - _FREE_DESCRIPTORS) * _SOCKET_BYTES
    except OSError:
        return 0  # it ended, or may not be read


def disk_of(folder: str, is_own_mount: bool, most_files: int) -> tuple[int, int]:
    """(bytes on disk, files) of a run's folder; counting ends above `most_files`.

    A folder that cannot be looked into, by its rights or the length of its path, counts as more than any limit.
    """
    if is_own_mount:
        stats = os.statvfs(folder)
        return (stats.f_blocks - stats.f_bfree) * stats.f_frsize, 0
    size = number = 0
    waiting = [folder]
    while waiting and number <= most_files:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    number += 1
                    if number > most_files:
                        break
                    size += _blocks_of(entry)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            pass  # it was removed meanwhile
        except OSError:
            return UNKNOWN, number
    return size, number


def _blocks_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0  # it was removed meanwhile; the others still count


def unlinked_of(pids: list[int], but: int) -> int:
    """Bytes on disk of files that have no name any more and that the processes hold open, but not of inode `but`.

    A process that hides its descriptors counts as more than any limit.
    """
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue  # it ended
        for task in tasks:  # a thread may outlive the first one, and may have descriptors of its own
            place = f"/proc/{pid}/task/{task}"
            try:
                for name in os.listdir(f"{place}/fd"):
                    try:
                        status = os.stat(f"{place}/fd/{name}")
                    except FileNotFoundError:
                        continue  # it was closed meanwhile
                    if status.st_nlink == 0 and status.st_ino != but:
                        sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
            except PermissionError:
                if not _has_ended(place):
                    return UNKNOWN
            except OSError:
                pass  # it ended
    return sum(sizes.values())


def _has_ended(task: str) -> bool:
    """Return whether the task, a folder of /proc, is gone, a zombie or about to be one: it has no memory any more."""
    return not _sum_of(f"{task}/status", ("VmSize:",))


def was_full(events: bytes) -> bool:
    """Return whether the kernel killed a process of a cgroup for want of memory, by the cgroup's file of events."""
    for line in events.splitlines():
        name, _, count = line.partition(b" ")
        if name == b"oom_kill":
            return count != b"0"
    return False
