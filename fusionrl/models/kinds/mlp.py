"""The dense MLP, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fusionrl.models.kinds.base import Mlp, ParallelSizes, RankSizes
from fusionrl.models.rules import LLAMA, Names, Rule

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape

_GATE_UP: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}


def gated_mlp(
    to: str, of: str, hidden: int, ffn: int, names: tuple[str, str, str] = LLAMA.expert, expert: int | None = None
) -> Iterator[Rule]:
    """A gated MLP under Megatron's prefix `to` and Hugging Face's `of`; `names` are gate, up, down."""
    gate, up, down = (f"{of}.{name}.weight" for name in names)
    yield Rule(f"{to}.linear_fc1.weight", {gate: (ffn, hidden), up: (ffn, hidden)}, "concat", "paired_rows", expert)
    yield Rule(f"{to}.linear_fc2.weight", {down: (hidden, ffn)}, "copy", "columns", expert)


def stacked_mlp(to: str, of: str, hidden: int, ffn: int, expert: int, count: int) -> Iterator[Rule]:
    """One of `count` experts with biases whose tensors are in a stack, under Megatron's prefix `to`."""
    both, down = f"{of}.gate_up_proj", f"{of}.down_proj"
    rule = partial(Rule, expert=expert, stack=count)
    yield rule(f"{to}.linear_fc1.weight", {both: (hidden, 2 * ffn)}, "interleaved", transposed=True)
    yield rule(f"{to}.linear_fc1.bias", {f"{both}_bias": (2 * ffn,)}, "interleaved")
    yield rule(f"{to}.linear_fc2.weight", {down: (ffn, hidden)}, transposed=True)
    yield rule(f"{to}.linear_fc2.bias", {f"{down}_bias": (hidden,)})


class Dense(Mlp):
    """A gated MLP; its width is the shape's."""

    engine_adapters: ClassVar[frozenset[str]] = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj"})

    kind: Literal["dense"] = "dense"

    def rules(self, shape: ModelShape, number: int, names: Names) -> Iterator[Rule]:
        """Gate over up, and down."""
        to, of = f"decoder.layers.{number}.mlp", f"model.layers.{number}.mlp"
        h, ffn = shape.hidden_size, shape.ffn_hidden_size
        if names.gate_up is None:
            yield from gated_mlp(to, of, h, ffn)
            return
        yield Rule(f"{to}.linear_fc1.weight", {f"{of}.{names.gate_up}.weight": (2 * ffn, h)}, split="paired_rows")
        yield Rule(f"{to}.linear_fc2.weight", {f"{of}.down_proj.weight": (h, ffn)}, split="columns")

    def divided(self, shape: ModelShape) -> dict[str, int]:
        """Rows of gate and up."""
        return {"rows of the MLP (intermediate_size)": shape.ffn_hidden_size}

    def kept_bytes(self, shape: ModelShape, rank: RankSizes) -> float:
        """Gate, up and their product; fused, the input and its norm as well."""
        ffn, hidden = 3 * shape.ffn_hidden_size / rank.tp, shape.hidden_size / rank.split
        if rank.is_fused:
            return rank.width * (hidden if "mlp" in rank.modules else 2 * hidden + ffn)
        # Recomputed, it keeps its input, which the norm before it has counted.
        return 0.0 if "mlp" in rank.modules else ffn * rank.width

    def widest(self, shape: ModelShape, rank: RankSizes) -> float:
        """Gate, up or their product."""
        return shape.ffn_hidden_size / rank.tp

    def engine_tensors(self) -> Mapping[str, tuple[str, ...]]:
        """SGLang keeps gate and up in one."""
        return _GATE_UP


class Experts(Mlp):
    """A mixture of experts.

    norm_topk_prob          the chosen experts' weights sum to `scaling_factor`
    expert_bias             a bias of the choice alone (DeepSeek-V3); no gradient reaches it
    num_groups, group_topk  experts are chosen from the best `group_topk` of `num_groups` groups
    shared_ffn_hidden_size  width of the expert that every token passes; 0: there is none
    bias       the router and the experts have biases
    glu_limit  experts multiply the activation of a gate of at most this by up + 1, up between this and its negative
               (gpt-oss); None: of any gate by up
    """

    kind: Literal["experts"] = "experts"
    num_experts: int = Field(gt=0)
    topk: int = Field(gt=0)
    ffn_hidden_size: int = Field(gt=0)
    norm_topk_prob: bool
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    expert_bias: bool = False
    scaling_factor: float = 1.0
    num_groups: int = Field(default=1, gt=0)
    group_topk: int = Field(default=1, gt=0)
    shared_ffn_hidden_size: int = Field(default=0, ge=0)
    shared_gate: bool = False
    bias: bool = False
    glu_limit: float | None = None

    needs_sequence_parallel: ClassVar[str] = "experts need"

    @property
    def has_whole_experts(self) -> bool:
        return self.bias

    @property
    def expert_rows(self) -> int:
        return self.ffn_hidden_size

    def fields(self, shape: ModelShape) -> dict[str, object]:
        """Router and experts."""
        changed: dict[str, object] = {"add_bias_linear": True} if self.bias else {}
        if self.glu_limit is not None:
            changed |= {"glu_linear_offset": 1.0, "activation_func_clamp_value": self.glu_limit}
        return changed | {
            "num_moe_experts": self.num_experts,
            "moe_ffn_hidden_size": self.ffn_hidden_size,
            "moe_layer_freq": [int(mlp.num_experts > 0) for mlp in shape.mlp],
            "moe_router_topk": self.topk,
            "moe_router_score_function": self.score_function,
            # Softmax over all experts, or over the chosen ones: the latter makes their weights sum to 1.
            "moe_router_pre_softmax": self.score_function == "softmax" and not self.norm_topk_prob,
            "moe_router_topk_scaling_factor": self.scaling_factor if self.scaling_factor != 1.0 else None,
            "moe_router_num_groups": self.num_groups if self.num_groups > 1 else None,
            "moe_router_group_topk": self.group_topk if self.num_groups > 1 else None,
            "moe_router_enable_expert_bias": self.expert_bias,
            # The engines must choose the same experts: nothing moves the bias unless the user says so.
            "moe_router_bias_update_rate": 0.0,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": self.shared_ffn_hidden_size or None,
            "moe_shared_expert_gate": self.shared_gate,
        }

    def rules(self, shape: ModelShape, number: int, names: Names) -> Iterator[Rule]:
        """The router, the experts, and the shared expert where there is one."""
        to, of, h = f"decoder.layers.{number}.mlp", f"model.layers.{number}.{names.experts}", shape.hidden_size
        yield Rule(f"{to}.router.weight", {f"{of}.{names.router}.weight": (self.num_experts, h)})
        if self.bias:
            yield Rule(f"{to}.router.bias", {f"{of}.{names.router}.bias": (self.num_experts,)})
        if self.expert_bias:
            bias = {f"{of}.{names.score_bias}": (self.num_experts,)}
            yield Rule(f"{to}.router.expert_bias", bias, buffer=True)
        for expert in range(self.num_experts):
            local = f"{to}.experts.local_experts.{expert}"
            if names.stacks:
                yield from stacked_mlp(local, f"{of}.experts", h, self.ffn_hidden_size, expert, self.num_experts)
            else:
                yield from gated_mlp(local, f"{of}.experts.{expert}", h, self.ffn_hidden_size, names.expert, expert)
        if self.shared_ffn_hidden_size:
            yield from gated_mlp(f"{to}.shared_experts", f"{of}.{names.shared}", h, self.shared_ffn_hidden_size)
        if self.shared_gate:
            yield Rule(f"{to}.shared_experts.gate_weight", {f"{of}.{names.shared}_gate.weight": (1, h)})

    def divided(self, shape: ModelShape) -> dict[str, int]:
        """The shared expert; routed ones are divided otherwise."""
        return {"rows of the shared expert": self.shared_ffn_hidden_size} if self.shared_ffn_hidden_size else {}

    def layout_errors(self, shape: ModelShape, layout: ParallelSizes) -> list[str]:
        """Megatron adds the bias of a divided expert once a rank."""
        if not self.has_whole_experts or layout.etp == 1:
            return []
        return [f"--expert-tensor-parallel-size {layout.etp}: experts with biases stand whole on a rank; give 1"]

    def kept_bytes(self, shape: ModelShape, rank: RankSizes) -> float:
        """Count what router, routed and shared experts keep."""
        return self._fused_bytes(shape, rank) if rank.is_fused else self._local_bytes(shape, rank)

    def routed(self, rank: RankSizes) -> float:
        """Tokens that this rank's experts work on, for each token of the packed row."""
        return self.topk * rank.etp * rank.imbalance / rank.split

    def _local_bytes(self, shape: ModelShape, rank: RankSizes) -> float:
        if "moe" in rank.modules:
            return 0.0
        width = rank.width
        router = self.topk * 4 * 5 + self.num_experts * 5
        if self.score_function == "sigmoid":
            router += self.num_experts * 4 + 4 * self.topk + 4
            if self.num_groups > 1:
                router += self.num_experts + 8 * self.group_topk
                router += 8 * self.num_groups * (self.topk // self.group_topk)
        saved = router / rank.split
        ffn = self.ffn_hidden_size / rank.etp
        # Gate and up, the activation, up with its offset, their product, and that by the router's weight; and what is
        # cut off, and its sigmoid.
        num_ffn = 6 if self.glu_limit is None else 8
        saved += self.routed(rank) * (width * (shape.hidden_size + num_ffn * ffn) + 4)
        if self.shared_ffn_hidden_size and "shared_experts" not in rank.modules:
            saved += 5 * self.shared_ffn_hidden_size / rank.tp * width
            saved += (4 + shape.hidden_size * width) / rank.split if self.shared_gate else 0.0
        return saved

    def _fused_bytes(self, shape: ModelShape, rank: RankSizes) -> float:
        hidden = shape.hidden_size / rank.split
        if "moe" in rank.modules:
            return rank.width * 2 * hidden
        saved = (1 if "layernorm" in rank.modules else 2) * hidden
        if "shared_experts" not in rank.modules:
            saved += 3 * self.shared_ffn_hidden_size / rank.tp
        num_ffn = 2 if "moe_act" in rank.modules else 3 if self.glu_limit is None else 8
        saved += self.routed(rank) * (2 * shape.hidden_size + num_ffn * self.ffn_hidden_size / rank.etp)
        return rank.width * saved

    def widest(self, shape: ModelShape, rank: RankSizes) -> float:
        """Of the routed experts, or of their inputs."""
        return self.routed(rank) * max(self.ffn_hidden_size / rank.etp, shape.hidden_size / 3)

    def engine_tensors(self) -> Mapping[str, tuple[str, ...]]:
        """Gate and up of the shared expert; all routed experts are in two tensors (`weights/checksums.py`)."""
        return _GATE_UP
