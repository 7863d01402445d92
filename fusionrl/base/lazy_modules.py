"""A module that others import for a name that they seldom use: a stand-in while they are imported, then the real one.

The stand-in has functions that import the real module when they are called, errors that only the real module raises,
and texts that no code reads before. It imports the real module for any other name. Who imports the module afterwards
gets the real one, and so do modules that have imported a name from the stand-in.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader


@contextmanager
def imported_later(
    name: str, called: Sequence[str] = (), caught: Sequence[str] = (), constants: Sequence[str] = ()
) -> Iterator[None]:
    """Import what imports module `name` within it. Nothing is done where the module is imported already.

    called     functions and classes of it that the importing modules only call
    caught     its errors that they only catch, and that no other module raises
    constants  its texts that they read only where another module has imported it
    """
    if name in sys.modules:
        yield
        return
    if name not in _stand_ins:
        _stand_ins[name] = _StandIn(name, called, caught, constants)
        # It stays: the module may be imported at any time.
        sys.meta_path.insert(0, AfterImport(name, _stand_ins[name].replace))
    sys.modules[name] = stand_in = _stand_ins[name]
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


_stand_ins: dict[str, _StandIn] = {}  # by the name of the module


def when_imported(name: str, function: Callable[[types.ModuleType], None]) -> None:
    """Call `function` with module `name`: now if it is imported, else as soon as it is."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport(name, function))


class _StandIn(types.ModuleType):
    def __init__(self, name: str, called: Sequence[str], caught: Sequence[str], constants: Sequence[str]) -> None:
        super().__init__(name)
        self.taken: dict[str, object] = {attribute: functools.partial(_call, name, attribute) for attribute in called}
        self.taken |= {attribute: type(attribute, (RuntimeError,), {"__module__": name}) for attribute in caught}
        self.taken |= {attribute: f"{name}.{attribute}" for attribute in constants}

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.taken[name] if name in self.taken else getattr(_real(self.__name__), name)

    def replace(self, real: types.ModuleType) -> None:
        """Put the real names wherever this one's were taken."""
        for module in list(sys.modules.values()):
            held = vars(module) if isinstance(module, types.ModuleType) else {}
            for name, value in self.taken.items():
                if held.get(name) is value:
                    held[name] = getattr(real, name)
        self.taken = {}


def _call(module: str, name: str, *args: object, **kwargs: object) -> object:
    return getattr(_real(module), name)(*args, **kwargs)


def _real(name: str) -> types.ModuleType:
    if isinstance(sys.modules.get(name), _StandIn):
        del sys.modules[name]
    return importlib.import_module(name)


class AfterImport(MetaPathFinder):
    """Finds one module as usual, and calls a function with it when it has been imported."""

    def __init__(self, name: str, function: Callable[[types.ModuleType], None]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the one module; all others are for the other finders."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = loader = _Loader(spec.loader.name, spec.loader.path)
        loader.function = self._function
        return spec


class _Loader(SourceFileLoader):
    function: Callable[[types.ModuleType], None]

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        self.function(module)
