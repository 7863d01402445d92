"""Attention of a training step on a CPU: our kernel and torch's, forward and backward, by turns.

    python tools/bench/row_attention.py [--threads 1 --turns 15]

Each line is a micro-batch: prompts, samples of each, tokens of prompt and response, heads of queries and keys and their
size. Printed are milliseconds of one layer's forward and backward pass, medians of the turns, and the median ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

SIZES = (  # prompts, samples, prompt, response, query heads, key heads, size
    (16, 8, 9, 31, 4, 2, 32),  # the quickstart's model
    (4, 8, 9, 31, 9, 3, 64),  # SmolLM2-135M
    (4, 8, 60, 60, 9, 3, 64),
    (4, 4, 60, 180, 9, 3, 64),
    (2, 4, 60, 180, 16, 8, 128),
    (4, 2, 120, 380, 9, 3, 64),
    (4, 1, 1, 999, 9, 3, 64),
)


def sequences(num_prompts: int, num_samples: int, prompt: int, response: int) -> tuple[list[np.ndarray], int]:
    """(tokens of each sequence in the packed row, tokens of the row)."""
    rows, end = [], 0
    for _ in range(num_prompts):
        head = np.arange(end, end + prompt)
        end += prompt
        for _ in range(num_samples):
            rows.append(np.concatenate([head, np.arange(end, end + response)]))
            end += response
    return rows, end


def measure(sizes: tuple[int, ...], turns: int) -> tuple[float, float, float]:
    """Median milliseconds of our kernel and of torch's attention, and the median ratio."""
    import torch

    from fusionrl.cpu import row_attention
    from fusionrl.trainer.attention_buckets import plan_buckets
    from fusionrl.trainer.local_spec import PackedLayout, SDPACoreAttention

    *counts, heads, groups, size = sizes
    rows, num_tokens = sequences(*counts)
    prompts = [counts[2]] * len(rows)
    table = row_attention.plan_rows(rows, num_tokens)
    assert table is not None, "no kernels on this machine"
    torch_alone = PackedLayout(buckets=tuple(plan_buckets(rows, num_tokens, "cpu", prompts)))
    core = SDPACoreAttention.__new__(SDPACoreAttention)
    torch.nn.Module.__init__(core)
    settings: dict[str, Any] = {"scale": size**-0.5, "dropout": 0.0, "cp_group": None}
    core.__dict__.update(settings)
    wide = torch.randn(num_tokens, (heads + 2 * groups) * size).requires_grad_()
    of_output = torch.randn(num_tokens, heads * size)

    def seconds(layout: PackedLayout) -> float:
        start = time.perf_counter()
        parts = wide.split([heads * size, groups * size, groups * size], 1)
        out = core(*(part.view(num_tokens, -1, size) for part in parts), packed_seq_params=layout)
        torch.autograd.grad(out, wide, of_output)
        return time.perf_counter() - start

    ours_alone = PackedLayout(table=table)
    for layout in (ours_alone, torch_alone):
        seconds(layout)
    found = [(seconds(ours_alone), seconds(torch_alone)) for _ in range(turns)]
    ours, theirs = (1e3 * statistics.median(column) for column in zip(*found, strict=True))
    return ours, theirs, statistics.median(a / b for a, b in found)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    from fusionrl.cpu import megatron_patches

    megatron_patches.install()
    import torch

    torch.set_num_threads(options.threads)
    print("prompts x samples  prompt + response  heads          ours      torch   ratio")
    for sizes in SIZES:
        ours, theirs, ratio = measure(sizes, options.turns)
        num_prompts, num_samples, prompt, response, heads, groups, size = sizes
        shown = f"{num_prompts:7} x {num_samples:<9}{prompt:7} + {response:<9}{heads:3} / {groups} x {size:<4}"
        print(f"{shown} {ours:7.1f} ms {theirs:7.1f} ms   {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
