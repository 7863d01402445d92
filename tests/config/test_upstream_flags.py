"""Flags of SGLang, its router and Megatron-core, typed by upstream's own declarations."""

from typing import Any

import pytest

from fusionrl.config.parser import read_args


def ask(argv: str) -> tuple[dict[str, Any], list[str]]:
    """What passes through, and errors."""
    config, errors = read_args(argv.split())
    return {kind: values for kind, values in config.passthrough.model_dump().items() if values}, errors


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ("--sglang-mem-fraction-static 0.8", {"sglang": {"mem_fraction_static": 0.8}}),
        ("--sglang-chunked-prefill-size -1", {"sglang": {"chunked_prefill_size": -1}}),
        ("--sglang-disable-cuda-graph", {"sglang": {"disable_cuda_graph": True}}),
        ("--router-policy random", {"router": {"policy": "random"}}),
        ("--moe-aux-loss-coeff -1e-3", {"transformer": {"moe_aux_loss_coeff": -1e-3}}),
        ("--no-masked-softmax-fusion", {"transformer": {"masked_softmax_fusion": False}}),
        ("--masked-softmax-fusion=false", {"transformer": {"masked_softmax_fusion": False}}),
        ("--recompute-modules core_attn mlp", {"transformer": {"recompute_modules": ["core_attn", "mlp"]}}),
        # A field whose own name begins with "no_" is no negation.
        ("--no-rope-freq 4", {"transformer": {"no_rope_freq": 4}}),
        ("--grad-reduce-in-fp32", {"ddp": {"grad_reduce_in_fp32": True}}),
        # Two of Megatron's classes have this field: one flag sets both.
        ("--overlap-param-gather", {key: {"overlap_param_gather": True} for key in ("optimizer", "ddp")}),
    ],
)
def test_typed_by_upstream(argv: str, wanted: dict[str, Any]) -> None:
    found, errors = ask(argv)
    assert (found, errors) == (wanted, [])


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--sglang-mem-fraction-statc 0.8", ["did you mean --sglang-mem-fraction-static?"]),
        ("--sglang-mem-fraction-static abc", ["--sglang-mem-fraction-static abc", "float"]),
        ("--sglang-mem-fraction-static", ["expected one argument"]),
        ("--sglang-disable-cuda-graph yes", ["yes"]),
        ("--sglang-tp-size 2", ["--sglang-tp-size 2", "use --rollout-num-gpus-per-engine"]),
        ("--sglang-dp-size 2", ["--sglang-dp-size 2", "use --rollout-num-gpus: more devices are more engines"]),
        ("--sglang-pp-size 2", ["per-engine: an engine is divided by tensor parallelism alone"]),
        ("--sglang-model-path x", ["set by fusionrl", "use --hf-checkpoint"]),
        ("--router-host h", ["set by fusionrl (the node's own address)"]),
        ("--router-policy zzz", ["--router-policy zzz", "round_robin"]),
        ("--router-polcy random", ["did you mean --router-policy?"]),
        ("--no-bf16", ["use --precision"]),
        ("--moe-router-fusion x", ["does not fit its type"]),
        ("--recompute-granularity", ["it needs a value"]),
        ("--no-masked-softmax-fusion 1", ["takes no value"]),
        ("--overlap-grad-reduc", ["unknown flag; did you mean --overlap-grad-reduce?"]),
        ("--rollout-batch 8", ["unknown flag; did you mean --rollout-batch-size?"]),  # no abbreviations
    ],
)
def test_refused_with_flag_value_and_cure(argv: str, parts: list[str]) -> None:
    found, errors = ask(argv)
    assert found == {} and len(errors) == 1
    assert errors[0].startswith(argv.partition(" ")[0]) and all(part in errors[0] for part in parts), errors
