"""Suppress third-party logs while flags are checked."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Show no Python warnings, and no log records up to WARNING, of what is imported or called within.

    Megatron-core warns at its import of each package that it does without, transformers of long texts.
    """
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
