"""Threads of a push. Each sets its GPU first: in torch a new thread uses the process's first one.

Streams, and what NCCL and CUDA IPC take from "the current device", would otherwise be another rank's.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def start_thread(
    device: torch.device, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs
) -> threading.Thread:
    """Call `function` in a thread that works on `device` and does not keep the process alive."""

    def run() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        function(*args, **kwargs)

    thread = threading.Thread(target=run, name="weight-push", daemon=True)
    thread.start()
    return thread


def in_thread(device: torch.device, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Start such a call; return its future, which may stay unread."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(function(*args, **kwargs))
        except BaseException as error:  # handed over to the thread that asks for the result
            logger.debug("in a thread of a push", exc_info=True)
            # Its traceback holds this frame, and so the arguments: a store that ends with its last reference.
            answer.set_exception(error.with_traceback(None))

    start_thread(device, run)
    return answer
