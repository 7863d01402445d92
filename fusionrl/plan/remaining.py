"""The plan of the trainers on the devices that are left, after others were lost. Pure."""

from collections.abc import Sequence, Set
from dataclasses import replace

from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.plan import Plan


def remaining_plan(plan: Plan, lost: Set[int]) -> Plan:
    """Return the plan with smaller data-parallel sizes, which need none of the devices `lost` (bundles).

    Raises ValueError where none fits.
    """
    if plan.layout is not None and lost & set(plan.trainer_bundles):
        layout, bundles = _on_rest(plan.layout, plan.trainer_bundles, lost)
        plan = replace(plan, layout=layout, trainer_bundles=bundles)
    if plan.auxiliary is not None and lost & set(plan.auxiliary.bundles):
        layout, bundles = _on_rest(plan.auxiliary.layout, plan.auxiliary.bundles, lost)
        plan = replace(plan, auxiliary=replace(plan.auxiliary, layout=layout, bundles=bundles))
    return plan


def _on_rest(layout: TrainerLayout, bundles: Sequence[int], lost: Set[int]) -> tuple[TrainerLayout, tuple[int, ...]]:
    rest = [bundle for bundle in bundles if bundle not in lost]
    smaller = layout.smaller(len(rest))
    if smaller is None:
        raise ValueError(
            f"{len(bundles) - len(rest)} of {len(bundles)} devices of the trainers are lost, and no smaller"
            f" data-parallel size fits on the rest (tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, ep {layout.ep},"
            f" dp {layout.dp}): --resume on other devices continues from the last checkpoint"
        )
    return smaller, tuple(rest[: smaller.world_size])
