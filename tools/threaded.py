"""An object called as a Ray actor is, in threads of this process, for tools and tests that do without Ray."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any


class Threaded:
    """`target` with a Ray actor's way of calling: `Threaded(engine).pause.remote("abort")` is a future.

    Pickled, it takes `target` with it and makes threads anew.
    """

    def __init__(self, target: object) -> None:
        self.target = target

    def __getstate__(self) -> dict[str, object]:
        return {"target": self.target}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "target":
            raise AttributeError(name)
        return _Method(self._pool, getattr(self.target, name))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(8, thread_name_prefix="call")


class _Method:
    def __init__(self, pool: ThreadPoolExecutor, method: Callable[..., Any]) -> None:
        self._pool, self._method = pool, method

    def remote(self, *args: object, **kwargs: object) -> Future[Any]:
        return self._pool.submit(self._method, *args, **kwargs)
