"""Fields of `Sample` that hooks read as Python lists, as in slime, and that are packed arrays otherwise.

A hook reads `sample.tokens` as a list: `+` joins, `not sample.tokens` is true of an empty one, and appended values
stay. The array of an engine's answer becomes a list at the first such read; `Sample.pack` makes arrays again of the
lists that a hook left. fusionrl itself reads `sample.array(name)`, which unpacks nothing.

`append_response_tokens` extends a list that a hook reads or has set as a field of the response. A list of tokens that a
hook has set may be the prompt's own, and any list may belong to another sample too: it is copied before it grows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

_owners: dict[int, weakref.ref[Any]] = {}  # id of a list that only one sample holds, so that it may grow in place


def own(sample: object, value: list[Any]) -> list[Any]:
    """Note that no other sample holds the list `value`, and return it."""
    key = id(value)

    def forget(ref: weakref.ref[object]) -> None:
        if _owners.get(key) is ref:
            disown(key)

    _owners[key] = weakref.ref(sample, forget)
    return value


def disown(key: int) -> None:
    """Forget the owner of the list with the id `key`."""
    _owners.pop(key, None)


def owner_of(value: list[Any], name: str) -> object | None:
    """Return the sample that owns the list `value` in its field `name`; None where nobody does."""
    ref = _owners.get(id(value))
    sample = None if ref is None else ref()
    # Looked at, because the id may be of a list that is gone.
    return sample if sample is not None and sample.__dict__.get(name) is value else None


class ListField:
    """A field that is kept as an array or a list, and read as a list.

    grows  a list that is written here grows in place, as in slime, whose functions read the growth in their own
           variable; else a hook's list may be the prompt's own, and is copied before it grows
    """

    def __init__(self, name: str, grows: bool = True) -> None:
        self.name, self.grows = name, grows

    def __get__(self, sample: object, owner: type | None = None) -> Any:
        """Return the field; an array becomes a list, which stays in the sample."""
        if sample is None:
            return self
        try:
            value = sample.__dict__[self.name]
        except KeyError:
            raise AttributeError(self.name) from None
        if type(value) is np.ndarray:
            value = sample.__dict__[self.name] = own(sample, value.tolist())
        return value

    def __set__(self, sample: object, value: object) -> None:
        if type(value) is list:
            if owner_of(value, self.name) not in (None, sample):
                value = list(value)  # another sample's, which grows with that one
            if self.grows:
                own(sample, value)
        sample.__dict__[self.name] = value


class RareField:
    """A field that most samples leave as it is: such a sample does not hold it, so it costs nothing to copy or send.

    default  what reads an absent field
    make     makes it where it is read instead, and it stays in the sample: a dict, say, that a hook writes into
    """

    def __init__(self, name: str, default: object = None, make: Callable[[], object] | None = None) -> None:
        self.name, self.default, self.make = name, default, make

    def __get__(self, sample: object, owner: type | None = None) -> Any:
        """Return the field."""
        if sample is None:
            return self
        if self.make is not None and self.name not in sample.__dict__:
            sample.__dict__[self.name] = self.make()
        return sample.__dict__.get(self.name, self.default)

    def __set__(self, sample: object, value: object) -> None:
        if value is None or value is self.default:
            sample.__dict__.pop(self.name, None)
        else:
            sample.__dict__[self.name] = value


class PromptField:
    """The prompt: ids that were made of it when the data was read are forgotten when a hook writes another one."""

    def __get__(self, sample: object, owner: type | None = None) -> Any:
        """Return the prompt."""
        if sample is None:
            return self
        return sample.__dict__["prompt"]

    def __set__(self, sample: object, value: object) -> None:
        attributes = sample.__dict__
        if attributes.get("prompt_tokens") is not None and attributes["prompt"] != value:
            attributes["prompt_tokens"] = None
        attributes["prompt"] = value
