"""What glibc does with memory that a process frees. On other systems nothing here has an effect.

By itself glibc gives large blocks back to the system when they are freed, and the system maps the next ones page by
page, each filled with zeros: for a tensor that a step makes and drops, that can take longer than to compute it.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers of the two settings
_LARGEST = 2**31 - 1  # of a setting
_OLD_LIMIT = 32 * 2**20


def keep_freed(largest: int) -> None:
    """Let this process, and its forks, keep freed blocks of up to `largest` bytes for those that come after them.

    Of its main thread: blocks of others are kept where they are small. Its memory stays at its peak, until
    `give_freed_back`.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return
    # Older versions take no more than 32 MiB. Neither setting helps without the other.
    if set_option(_MMAP_THRESHOLD, largest) or set_option(_MMAP_THRESHOLD, min(largest, _OLD_LIMIT)):
        set_option(_TRIM_THRESHOLD, _LARGEST)


def give_freed_back() -> None:
    """Return to the system what was freed: glibc keeps the room of many small blocks in any case."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
