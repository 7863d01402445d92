"""All that a trainer rank imports until its first step, in a process of which not every fork is a trainer.

Torch stays as it is. The run's nursery imports it; `megatron_patches.install` is called in the fork, when it joins the
other ranks.
"""

from __future__ import annotations

import warnings

from fusionrl.cpu import megatron_patches
from fusionrl.cpu.lazy_torch import symbols_later

with warnings.catch_warnings(), symbols_later():
    warnings.simplefilter("ignore")
    megatron_patches.before_import()
