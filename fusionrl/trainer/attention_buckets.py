"""The attention calls of a packed row: which of its sequences share one padded call, and where their tokens stand.

Right padding needs no mask: under a causal mask no token sees what stands to its right. A packed token that several
rows share (a prompt) has the same past in each of them, so any one of its results is the result. Where a shared prompt
is long, only one row computes it: the others ask for the results of their own tokens alone, and see the prompt's keys
and values.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Sequences up to this length share one padded attention call however much they differ: the call costs more.
SHORT_SEQUENCE = 64
# A prompt is left out of siblings' queries where it is at least as long, and as long as their own tokens. Below, the
# rows of all siblings in one causal call, of which a half is not computed, cost less. Measured on a CPU.
LONG_PROMPT = 256


@dataclass(frozen=True)
class Places:
    """Where tokens of a bucket's rows stand. Indices are None where they would change nothing.

    length   that each row is padded to
    sources  [tokens] packed token of each token of the rows; rows may share packed tokens
    cells    [tokens] where each goes in the padded [count * length]
    """

    length: int
    sources: Tensor | None
    cells: Tensor | None


@dataclass(frozen=True)
class Bucket:
    """Rows (sequences) that share one padded attention call.

    count    rows in it
    rows     their tokens: keys and values
    queries  those of them that ask: the same, or the tokens after a prompt that another row computes
    mask     [queries' length, rows' length] True where a query sees a key; None: causal, the queries are the rows
    outputs  [outputs] cells of the queries whose result is kept, one a packed token; None: every one
    targets  [outputs] packed token that each is the result of; None: they are the packed row, in its order
    """

    count: int
    rows: Places
    queries: Places
    mask: Tensor | None
    outputs: Tensor | None
    targets: Tensor | None


def plan_buckets(
    rows: Sequence[np.ndarray],
    num_tokens: int,
    device: torch.device | str = "cpu",
    prompts: Sequence[int] | None = None,
) -> list[Bucket]:
    """Group rows so that none is padded to more than twice itself.

    rows                packed tokens of each sequence, in its order; tokens of the row of `num_tokens` in none are
                        padding
    num_tokens, device  of the packed row, and of the indices
    prompts             how many tokens at its begin each row may share with others; None: none
    """
    planner = _Planner(rows, num_tokens, device)
    unshared, families = _families(rows, prompts)
    parts = [(group, 0) for group in _by_length(unshared, [row.size for row in rows])]
    for prompt, members in families:
        parts += [(group, prompt) for group in _by_length(members, [row.size - prompt for row in rows])]
    return [planner.bucket(sorted(group), prompt, is_alone=len(parts) == 1) for group, prompt in parts]


def _families(
    rows: Sequence[np.ndarray], prompts: Sequence[int] | None
) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """(rows that are computed whole; (prompt, rows of which it is left out) of each long prompt that rows share)."""
    siblings: dict[tuple[int, int], list[int]] = defaultdict(list)
    unshared = []
    for i, row in enumerate(rows):
        prompt = prompts[i] if prompts is not None else 0
        if prompt >= LONG_PROMPT and row.size > prompt:
            siblings[int(row[0]), prompt].append(i)
        else:
            unshared.append(i)
    families = []
    for (_, prompt), members in siblings.items():
        # The longest computes the prompt: it would pad the others most.
        first, *rest = sorted(members, key=lambda i: -rows[i].size)
        unshared.append(first)
        left_out = [i for i in rest if rows[i].size - prompt <= prompt]
        unshared += [i for i in rest if rows[i].size - prompt > prompt]
        if left_out:
            families.append((prompt, left_out))
    return unshared, families


def _by_length(chosen: list[int], sizes: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for i in sorted((i for i in chosen if sizes[i]), key=lambda i: -sizes[i]):
        longest = sizes[groups[-1][0]] if groups else 0
        if groups and (2 * sizes[i] >= longest or longest <= SHORT_SEQUENCE):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class _Planner:
    """Makes buckets one after the other; each packed token is the output of the first bucket that has it."""

    def __init__(self, rows: Sequence[np.ndarray], num_tokens: int, device: torch.device | str) -> None:
        self.rows, self.num_tokens, self.device = rows, num_tokens, device
        self._claimed = np.zeros(num_tokens, dtype=bool)

    def bucket(self, chosen: list[int], prompt: int, is_alone: bool) -> Bucket:
        """Make the bucket of these rows, of which `prompt` tokens do not ask."""
        rows = [self.rows[i] for i in chosen]
        asking = [row[prompt:] for row in rows]
        length = max(row.size for row in asking)
        sources, cells = np.concatenate(asking), _cells(asking, length)
        targets, first = np.unique(sources, return_index=True)
        new = ~self._claimed[targets]
        targets, outputs = targets[new], cells[first[new]]
        self._claimed[targets] = True
        is_everything = is_alone and targets.size == self.num_tokens
        queries = self._places(asking, length, is_everything)
        mask = None
        if prompt:
            mask = torch.ones(length, prompt + length, dtype=torch.bool, device=self.device).tril_(prompt)
        return Bucket(
            count=len(rows),
            rows=self._places(rows, prompt + length, is_everything) if prompt else queries,
            queries=queries,
            mask=mask,
            outputs=self._index(outputs, np.array_equal(outputs, np.arange(len(rows) * length))),
            targets=self._index(targets, is_everything),
        )

    def _places(self, rows: Sequence[np.ndarray], length: int, is_everything: bool) -> Places:
        sources, cells = np.concatenate(rows), _cells(rows, length)
        return Places(
            length=length,
            sources=self._index(sources, is_everything and np.array_equal(sources, np.arange(self.num_tokens))),
            cells=self._index(cells, cells.size == len(rows) * length),
        )

    def _index(self, values: np.ndarray, is_identity: bool) -> Tensor | None:
        return None if is_identity else torch.from_numpy(values).to(self.device)


def _cells(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    return np.concatenate([index * length + np.arange(row.size) for index, row in enumerate(rows)])
