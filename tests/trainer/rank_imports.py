"""All that a trainer rank imports, in the right order; `tests.trainer.local_ranks` forks its processes after it."""

import warnings

from fusionrl.base import cpu_wing
from fusionrl.base.imports import without_collections

with warnings.catch_warnings(), without_collections():
    warnings.simplefilter("ignore")
    cpu_wing.prepare_megatron()
    import fusionrl.trainer.model  # and with it Megatron
    import fusionrl.trainer.policy
    import fusionrl.trainer.trainer_base  # noqa: F401
