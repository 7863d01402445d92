"""Names of `slime.utils.eval_config` and `miles.utils.file_arg_utils`: what a function reads of --eval-config."""

from __future__ import annotations

import base64
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from pathlib import Path

PSEUDO_FILE_PREFIX = "base64:"
_Attributes = Mapping[str, tuple[str, ...]]
# Setting of a set → names in `args`, of which the first that is given counts.
DATASET_RUNTIME_SPECS: _Attributes = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", "n_samples_per_prompt"),
    **{
        name: (f"eval_{name}", f"rollout_{name}")
        for name in ("temperature", "top_p", "top_k", "max_response_len", "stop", "stop_token_ids", "min_new_tokens")
    },
}


def resolve_file_arg(value: str) -> str:
    """Return the text of a file, or the text that `value` encodes after the prefix `base64:`."""
    if value.startswith(PSEUDO_FILE_PREFIX):
        return base64.b64decode(value.removeprefix(PSEUDO_FILE_PREFIX), validate=True).decode()
    return Path(value).read_text(encoding="utf-8")


def _apply_dataset_field_overrides(
    args: Namespace, dataset_cfg: MutableMapping[str, object], defaults: Mapping[str, object], spec_names: _Attributes
) -> None:
    """Fill in the settings of a set that it lacks: from the defaults of the file, else from the flags."""
    for name, attributes in spec_names.items():
        values = (getattr(args, attribute, None) for attribute in attributes)
        of_flags = next((value for value in values if value is not None), None)
        dataset_cfg.setdefault(name, defaults.get(name, of_flags))
