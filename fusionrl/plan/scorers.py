"""The plan of the engines that only read: a reward model's and a teacher's, on devices of their own."""

from dataclasses import dataclass, field
from typing import Literal

from fusionrl.config.config import Config
from fusionrl.config.run_parts import uses_engines
from fusionrl.models.quantization import BlockFp8, read_described
from fusionrl.models.shape import ModelShape
from fusionrl.plan.engine_places import place_engines

ScorerRole = Literal["reward-model", "teacher"]


@dataclass(frozen=True)
class ScorerPlan:
    """Engines that only read, and whose weights stay as they are: a reward model's or a teacher's.

    bundles       engine → its bundles
    server_args   the user's fields of ServerArgs
    shape         of its model; None: its config.json is not here, or is one of a family that only SGLang knows
    quantization  that its config.json describes
    unknown       the reason why the shape is unknown
    """

    role: ScorerRole
    model_path: str
    bundles: tuple[tuple[int, ...], ...]
    server_args: dict[str, object] = field(default_factory=dict)
    shape: ModelShape | None = None
    quantization: BlockFp8 | None = None
    unknown: str = ""

    @property
    def size(self) -> int:
        """Devices of one engine (its tensor parallel size)."""
        return len(self.bundles[0])

    @property
    def name(self) -> str:
        return self.role.replace("-", " ")


def plan_scorers(config: Config, first: int) -> tuple[ScorerPlan, ...]:
    """The engines that only read, on devices from `first` on."""
    if not uses_engines(config):
        return ()
    reward, algorithm, per_node = config.reward, config.algorithm, config.cluster.num_gpus_per_node
    requests: list[tuple[ScorerRole, str, str, int, int, dict[str, object]]] = []
    if reward.rm_model is not None:
        sizes = (reward.rm_num_gpus, reward.rm_num_gpus_per_engine)
        requests.append(("reward-model", "--rm", reward.rm_model, *sizes, reward.rm_server_args))
    if algorithm.use_opd and algorithm.opd_type == "sglang" and algorithm.opd_teacher_load is not None:
        sizes = (algorithm.opd_teacher_num_gpus, algorithm.opd_teacher_num_gpus_per_engine)
        path = algorithm.opd_teacher_load
        requests.append(("teacher", "--opd-teacher", path, *sizes, algorithm.opd_teacher_server_args))
    scorers = []
    for role, prefix, path, count, size, server_args in requests:
        bundles = place_engines(f"{prefix}-num-gpus", f"{prefix}-num-gpus-per-engine", count, size, first, per_node)
        first = 1 + bundles[-1][-1]
        scorers.append(ScorerPlan(role, path, bundles, server_args, *_model_of(role, path)))
    return tuple(scorers)


def _model_of(role: ScorerRole, path: str) -> tuple[ModelShape | None, BlockFp8 | None, str]:
    """Shape and quantisation of the model, or the reason why they are not known."""
    flag = "--rm-model" if role == "reward-model" else "--opd-teacher-load"
    try:
        shape, quantization = read_described(path, flag)
    except ValueError as error:  # what a run cannot do with is refused elsewhere: SGLang knows more families
        return None, None, str(error)
    # A classifier has a score in place of the output layer, as a critic has.
    return shape.with_value_head() if role == "reward-model" else shape, quantization, ""
