"""How the trainer's ranks are laid out over tensor, pipeline, context, expert and data parallelism. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankCoordinates:
    """Where one rank stands in the dense layout."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class TrainerLayout:
    """Parallel sizes of the trainers, in Megatron-core's default order "tp-cp-ep-dp-pp".

    The rank of (tp, cp, dp, pp) is `tp + TP * (cp + CP * (dp + DP * pp))`. Expert layers divide the same
    ranks anew, as (etp, ep, expert dp, pp). Example: 8 ranks with tp 2 and pp 2 have dp 2, and rank 6 is
    (tp 0, cp 0, dp 1, pp 1).

    Raises:
        ValueError: a size below 1, or sizes that do not divide `world_size`.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        flags = {
            "world_size": "--actor-num-nodes × --actor-num-gpus-per-node",
            "tp": "--tensor-model-parallel-size",
            "pp": "--pipeline-model-parallel-size",
            "cp": "--context-parallel-size",
            "ep": "--expert-model-parallel-size",
            "etp": "--expert-tensor-parallel-size",
        }
        for name, flag in flags.items():
            if getattr(self, name) < 1:
                raise ValueError(f"{flag} is {getattr(self, name)}; it must be at least 1")
        ranks = f"{flags['world_size']} is {self.world_size}, which"
        if self.world_size % (self.tp * self.pp * self.cp):
            raise ValueError(
                f"{ranks} tp {self.tp} × pp {self.pp} × cp {self.cp} does not divide; "
                f"change {flags['tp']}, {flags['pp']} or {flags['cp']}, or the number of ranks"
            )
        if self.world_size % (self.etp * self.ep * self.pp):
            raise ValueError(
                f"{ranks} etp {self.etp} × ep {self.ep} × pp {self.pp} does not divide; "
                f"change {flags['ep']} or {flags['etp']}, or the number of ranks"
            )

    @property
    def dp(self) -> int:
        """Data-parallel size: the number of train shards."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of the expert layers."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def coordinates(self, rank: int) -> RankCoordinates:
        """Where `rank` stands.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks of the trainer")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return RankCoordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, coordinates: RankCoordinates) -> int:
        """The rank that stands at `coordinates`."""
        c = coordinates
        return c.tp + self.tp * (c.cp + self.cp * (c.dp + self.dp * c.pp))

    def dp_rank(self, rank: int) -> int:
        """The train shard that `rank` works on."""
        return self.coordinates(rank).dp

    def ranks_of_dp(self, dp: int) -> list[int]:
        """All ranks that work on train shard `dp`, ascending."""
        return [rank for rank in range(self.world_size) if self.coordinates(rank).dp == dp]
