"""Rows of supervised data that hold token ids and a loss mask: they are trained on exactly as they stand.

`--mode reject-sampling` writes such rows where text alone would lose which tokens the model sampled: answers of several
turns, with a tool's text between them. Text of such a row is for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusionrl.data.findings import Finding
from fusionrl.data.sample import Sample, Status, response_mask

TOKENS, LOSS_MASK = "tokens", "loss_mask"
_LARGEST_ID = int(np.iinfo(np.int32).max)


def holds_tokens(row: Mapping[str, object]) -> bool:
    """Return whether a row has both columns; one alone is a column of something else."""
    return row.get(TOKENS) is not None and row.get(LOSS_MASK) is not None


def token_columns(sample: Sample) -> dict[str, np.ndarray]:
    """Return both columns of a sample: the mask runs over all tokens, and is 0 on the prompt's.

    Raises:
        ValueError: the sample's fields do not fit together.
    """
    sample.validate()
    mask = np.concatenate([np.zeros(sample.prompt_length, np.float32), response_mask(sample)])
    is_binary = bool(np.isin(mask, (0, 1)).all())  # a share of a token cannot be read back, and is not rounded here
    return {
        TOKENS: np.asarray(sample.array("tokens"), np.int32),
        LOSS_MASK: mask.astype(np.int32) if is_binary else mask,
    }


def token_finding(row: Mapping[str, object], vocab_size: int | None) -> Finding | None:
    """Return what is wrong with both columns of a row; None for nothing.

    vocab_size  of the model, where it is known: ids of tokens are below it
    """
    tokens, mask = row[TOKENS], row[LOSS_MASK]
    for name, values in ((TOKENS, tokens), (LOSS_MASK, mask)):
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            return Finding(f"column {name!r} is not a list of whole numbers")
    assert isinstance(tokens, list) and isinstance(mask, list)
    if not tokens:
        return Finding(f"column {TOKENS!r} is empty")
    most = _LARGEST_ID if vocab_size is None else vocab_size - 1
    wrong = next((token for token in tokens if not 0 <= token <= most), None)
    if wrong is not None:
        hint = "are they of another model's tokenizer?"
        return Finding(f"column {TOKENS!r} holds an id that is not in the vocabulary (0..{most})", str(wrong), hint)
    if len(mask) != len(tokens):
        cause = f"columns {TOKENS!r} and {LOSS_MASK!r} differ in length; give one value of the mask for each token"
        return Finding(cause, f"{len(tokens)} and {len(mask)}")
    if not set(mask) <= {0, 1}:
        return Finding(f"column {LOSS_MASK!r} holds another value than 0 and 1")
    if 1 not in mask:
        return Finding(f"column {LOSS_MASK!r} is 0 on every token; nothing is left to train on")
    if mask[0] == 1:
        return Finding(f"column {LOSS_MASK!r} is 1 on the first token; nothing stands before it to predict it from")
    return None


def prompt_length(row: Mapping[str, Any]) -> int:
    """Return the number of tokens before the first that is trained on."""
    return list(row[LOSS_MASK]).index(1)


def token_sample(row: Mapping[str, Any], prompt: str | list[dict[str, Any]]) -> Sample:
    """Return the sample of a row in which nothing is wrong; its response begins at the first trained token."""
    start = prompt_length(row)
    return Sample(
        prompt=prompt,
        tokens=np.asarray(row[TOKENS], np.int32),
        response_length=len(row[TOKENS]) - start,
        loss_mask=np.asarray(row[LOSS_MASK][start:], np.int32),
        reward=0.0,
        status=Status.COMPLETED,
    )
