"""The registry of whole samples' advantages. To add one: a file with the function, and a line here.

They are numbers of a rollout's samples; `Responses.spread` gives each trained token its sample's. The token-wise
ones, which need log-probs or a critic, are in `returns.py`, `gae.py`, `prime.py`; `distillation.py`
adds to any.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fusionrl.algorithms.groups import SampleBatch
from fusionrl.algorithms.grpo import dr_grpo, grpo
from fusionrl.algorithms.opo import opo
from fusionrl.algorithms.pass_at_k import pass_at_k_advantages
from fusionrl.algorithms.reinforce_plus_plus import reinforce_plus_plus_baseline
from fusionrl.algorithms.remax import remax
from fusionrl.algorithms.rloo import rloo

# SampleBatch of n samples -> [n] float64
GROUP_ADVANTAGES: dict[str, Callable[[SampleBatch], np.ndarray]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "pass_at_k": pass_at_k_advantages,
}
