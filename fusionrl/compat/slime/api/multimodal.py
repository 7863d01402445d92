"""Names of `slime.utils.types` for images, videos and sounds, which are not trained on yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass
class MultimodalType:
    """A kind of input: its name in a message's content, and its placeholder in a text."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The kinds."""

    IMAGE: ClassVar = MultimodalType("image", "<image>")
    VIDEO: ClassVar = MultimodalType("video", "<video>")
    AUDIO: ClassVar = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        """Return the kinds."""
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """Return the kind of a name."""
        return next((kind for kind in cls.all() if kind.name == name), None)
