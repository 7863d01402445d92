"""Fields of `Sample` that are more than plain attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class _StoredField:
    """A field that is read as it is stored."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, sample: object | None, owner: type | None = None) -> Any:
        """Return the field."""
        if sample is None:
            return self
        try:
            return sample.__dict__[self.name]
        except KeyError:
            raise AttributeError(self.name) from None


class ListField(_StoredField):
    """A field that hooks read as a list, as in slime; fusionrl stores an array and reads it with `Sample.array`.

    The list that a hook reads replaces the array, so that appended values stay; `Sample.pack` makes an array of it
    again. A list belongs to one sample: `append_response_tokens` extends the lists of the response in place, as
    slime's functions expect that keep one in a variable. Tokens become a new array instead, for a hook may have set the
    prompt's own list.
    """

    def __get__(self, sample: object | None, owner: type | None = None) -> Any:
        """Return the field; an array becomes a list, which stays in the sample."""
        value = super().__get__(sample, owner)
        if sample is not None and isinstance(value, np.ndarray):
            value = sample.__dict__[self.name] = value.tolist()
        return value

    def __set__(self, sample: object, value: object) -> None:
        sample.__dict__[self.name] = value


class DefaultField(_StoredField):
    """One of slime's fields, never None: where a hook or a file sets None, it is `make()`."""

    def __init__(self, name: str, make: Callable[[], object]) -> None:
        super().__init__(name)
        self.make = make

    def __set__(self, sample: object, value: object) -> None:
        sample.__dict__[self.name] = self.make() if value is None else value


class PromptField(_StoredField):
    """The prompt: the ids made of it when the data was read are forgotten when a hook writes another one."""

    def __set__(self, sample: object, value: object) -> None:
        attributes = sample.__dict__
        if attributes.get("prompt_tokens") is not None and attributes["prompt"] != value:
            attributes["prompt_tokens"] = None
        attributes["prompt"] = value
