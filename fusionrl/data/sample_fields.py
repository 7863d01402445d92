"""Fields of `Sample` that are more than plain attributes."""

from __future__ import annotations

from typing import Any

import numpy as np


class ListField:
    """A field that hooks read as a list, as in slime; fusionrl stores an array and reads it with `Sample.array`.

    The list that a hook reads replaces the array, so that appended values stay; `Sample.pack` makes an array of it
    again. A list belongs to one sample: `append_response_tokens` extends the lists of the response in place, as
    slime's functions expect that keep one in a variable. Tokens become a new array instead, for a hook may have set the
    prompt's own list.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, sample: object | None, owner: type | None = None) -> Any:
        """Return the field; an array becomes a list, which stays in the sample."""
        if sample is None:
            return self
        value = sample.__dict__[self.name]
        if isinstance(value, np.ndarray):
            value = sample.__dict__[self.name] = value.tolist()
        return value

    def __set__(self, sample: object, value: object) -> None:
        sample.__dict__[self.name] = value


class PromptField:
    """The prompt: the ids made of it when the data was read are forgotten when a hook writes another one."""

    def __get__(self, sample: object | None, owner: type | None = None) -> Any:
        """Return the prompt."""
        return self if sample is None else sample.__dict__["prompt"]

    def __set__(self, sample: object, value: object) -> None:
        attributes = sample.__dict__
        if attributes.get("prompt_tokens") is not None and attributes["prompt"] != value:
            attributes["prompt_tokens"] = None
        attributes["prompt"] = value
