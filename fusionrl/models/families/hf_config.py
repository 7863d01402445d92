"""A parsed config.json of Hugging Face, as families read it, under transformers' names."""

from collections.abc import Mapping
from typing import Any

# A value of a wrong type is found where `ModelShape` is made of what a family read.
HfConfig = Mapping[str, Any]
