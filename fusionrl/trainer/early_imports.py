"""All that a trainer rank imports until its first step, in a process of which not every fork is a trainer.

Torch stays as it is. The run's nursery imports it; `cpu_megatron.install` is called in the fork, when it joins the
other ranks.
"""

from __future__ import annotations

import warnings

from fusionrl.upstream import cpu_megatron
from fusionrl.upstream.torch_later import symbols_later

with warnings.catch_warnings(), symbols_later():
    warnings.simplefilter("ignore")
    cpu_megatron.before_import()
    import fusionrl.models.hf_io
    import fusionrl.sync.broadcast
    import fusionrl.sync.send
    import fusionrl.trainer.adam
    import fusionrl.trainer.checkpoint
    import fusionrl.trainer.megatron_spans
    import fusionrl.trainer.model
    import fusionrl.trainer.process_groups
    import fusionrl.trainer.pull
    import fusionrl.trainer.report
    import fusionrl.trainer.roles
    import fusionrl.trainer.rollout_data
    import fusionrl.trainer.steps
    import fusionrl.trainer.token_scores
    import fusionrl.trainer.train_hooks  # noqa: F401
