"""All that a trainer rank imports until its first step, in a process of which not every fork is a trainer.

Torch stays as it is. The run's nursery imports this module; a fork that joins the other ranks calls
`megatron_patches.install`.
"""

import importlib
import warnings

from fusionrl.cpu import megatron_patches
from fusionrl.cpu.import_stand_ins import symbols_later

_MODULES = (  # by name, as a linter takes imports for unused and removes them
    "fusionrl.models.hf_io",
    "fusionrl.trainer.advantages",
    "fusionrl.trainer.checkpoint",
    "fusionrl.trainer.host_memory",
    "fusionrl.trainer.model",
    "fusionrl.trainer.policy",
    "fusionrl.trainer.process_groups",
    "fusionrl.trainer.shards",
    "fusionrl.trainer.steps",
    "fusionrl.trainer.train_hooks",
    "fusionrl.weights.broadcast",
    "fusionrl.weights.send",
)

with warnings.catch_warnings(), symbols_later():
    warnings.simplefilter("ignore")
    megatron_patches.before_import()
    for _module in _MODULES:
        importlib.import_module(_module)
