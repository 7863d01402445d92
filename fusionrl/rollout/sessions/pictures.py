"""Images in agents' requests: parts of messages in three protocols' forms.

    OpenAI's chat     {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}
    its responses     {"type": "input_image", "image_url": "data:…"}
    Anthropic's       {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "…"}}

All are read into `{"type": "image", "image": …}`, first with the `data:` URI and then with a reference to the image in
the store, by which two conversations are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusionrl.data.image_rows import IMAGE_PARTS, image_value
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageRef
from fusionrl.data.sample_images import as_ref
from fusionrl.rollout.sessions.refusal import Refused

Message = dict[str, object]


def image_part(part: Mapping[str, object], where: str) -> Message | None:
    """Return a part that is an image, with its `data:` URI; None for another part.

    where  the field, for messages

    Raises:
        Refused: the image itself is not in the request.
    """
    if part.get("type") not in IMAGE_PARTS:
        return None
    uri = image_value(part)
    if not isinstance(uri, str) or not uri.startswith("data:"):
        told = uri if isinstance(uri, str) else uri or dict(part)
        raise Refused(f"{where} holds the image {told!s:.80}: nothing is fetched here; send it in base64")
    return {"type": "image", "image": uri}


@dataclass
class Pictures:
    """The images of a session, by hashes of their `data:` URIs, which have megabytes."""

    _known: dict[bytes, ImageRef] = field(default_factory=dict)

    def taken(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with references in place of `data:` URIs.

        Raises:
            Refused: the model gets no images, or one cannot be read.
        """
        return [
            {**message, "content": [self._taken(part) for part in content]}
            if isinstance(content := message["content"], list)
            else message
            for message in messages
        ]

    def _taken(self, part: Message) -> Message:
        uri = part.get("image")
        if not isinstance(uri, str):
            return part
        if IMAGES.processor is None:
            raise Refused("a message holds an image, and the model here reads text alone (--multimodal-keys)")
        try:
            key = hashlib.sha256(uri.encode()).digest()
            if key not in self._known:
                self._known[key] = as_ref(uri, IMAGES.processor)
        except ValueError as error:
            raise Refused(f"an image in a message cannot be used: {error}") from error
        return {"type": "image", "image": self._known[key]}


def images_of(messages: Sequence[Message]) -> list[ImageRef]:
    """Return the images of messages, in order."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [image for part in parts if isinstance(image := part.get("image"), ImageRef)]


def without_data(message: Message) -> Message:
    """Return a message as chat templates read it: an image is a part without data."""
    content = message["content"]
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [{"type": "image"} if "image" in part else part for part in content]}
