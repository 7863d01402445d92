"""Imports of large libraries, without the collections of garbage that they set off."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Import large libraries within it.

    torch, transformers and SGLang make a million objects that live as long as the process. The collector looks through
    all of them again and again while they are made: a fifth of the time. Afterwards it never looks at them, nor at what
    else lives at this moment; so nothing is done where everything was imported before.
    """
    is_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if is_enabled:
            gc.enable()
