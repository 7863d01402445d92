"""Each group stage in the table of estimators once, under the first name that has it."""

from fusionrl.algorithms.estimators import ESTIMATORS, GroupStage

_FIRST_NAMES = {e.group: name for name, e in reversed(ESTIMATORS.items()) if e.group is not None}
GROUP_STAGES: dict[str, GroupStage] = {name: stage for stage, name in reversed(_FIRST_NAMES.items())}
