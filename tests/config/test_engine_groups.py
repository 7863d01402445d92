"""--engine-group: reading the groups, and the devices that follow from them."""

import pytest

from fusionrl.config import upstream_flags
from fusionrl.config.engine_groups import ALIKE, EngineGroup, read_groups
from fusionrl.config.parser import CommandLineError, parse_args


def test_names_sizes_roles_and_flags_of_sglang_s_own_types() -> None:
    """A flag is spelt as SGLang has it, or as --sglang-… here; lists are JSON; a switch is true or false."""
    texts = {
        "wide:num_gpus=4,per_engine=2,mem-fraction-static=0.8,--sglang-disable-cuda-graph=true": EngineGroup(
            "wide", "generate", 4, 2, {"mem_fraction_static": 0.8, "disable_cuda_graph": True}
        ),
        'small:num_gpus=1,custom-weight-loader=["a.b","c.d"],sleep-on-idle=false': EngineGroup(
            "small", "generate", 1, 1, {"custom_weight_loader": ["a.b", "c.d"], "sleep_on_idle": False}
        ),
        "tests:num_gpus=2,role=eval": EngineGroup("tests", "eval", 2, 1),
    }
    found = read_groups(tuple(texts), 1)
    assert found == tuple(texts.values()) and [group.num_engines for group in found] == [2, 1, 2]
    assert read_groups(("a:num_gpus=4",), 2)[0].per_engine == 2, "the run's size unless the group says"


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (["num_gpus=4"], ["--engine-group num_gpus=4", "NAME:num_gpus=N"]),
        (["a:per_engine=2"], ["num_gpus is missing"]),
        (["a:num_gpus=x"], ["num_gpus=x: expected a number of devices"]),
        (["a:num_gpus=0"], ["num_gpus=0", "at least 1"]),
        (["a:num_gpus=4,per_engine=3"], ["num_gpus=4", "per_engine=3", "1, 2 and 4"]),
        (["a:num_gpus=4,role=judge"], ["role=judge", "generate, prefill, decode, eval"]),
        (["a:num_gpus=4,sleep-on-idle"], ["'sleep-on-idle' has no value", "FLAG=true for a switch"]),
        (["a:num_gpus=4,sleep-on-idle=yes"], ["it is a switch; write true or false"]),
        (["a:num_gpus=4,num_gpus=2"], ["num_gpus is there twice"]),
        (["a:num_gpus=4,mem-fraction-static=big"], ["mem_fraction_static=big", "float"]),
        (["a:num_gpus=4,tp-size=2"], ["tp_size=2: it is set by fusionrl; use --rollout-num-gpus-per-engine"]),
        (["a:num_gpus=4,disaggregation-mode=prefill"], ["use --engine-group: role=prefill"]),
        (["a:num_gpus=4,quantization=fp8"], ["is the same for all engines", "give --sglang-quantization"]),
        (["a:num_gpus=4", "a:num_gpus=2"], ["--engine-group a: there are two groups of this name"]),
        (["a:num_gpus=1,role=eval", "b:num_gpus=1,role=eval"], ["two groups have role=eval"]),
        (["a:num_gpus=1,role=prefill"], ["role=prefill needs one with role=decode"]),
        (["a:num_gpus=1,role=decode"], ["role=decode needs one with role=prefill"]),
        (["a:num_gpus=1,role=prefill", "b:num_gpus=1,role=decode", "c:num_gpus=1"], ["role=generate", "role=prefill"]),
    ],
)
def test_mistakes_are_refused_with_text_and_cure(texts: list[str], parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^--engine-group") as refused:
        read_groups(tuple(texts), 1)
    assert all(part in str(refused.value) for part in parts), str(refused.value)


def test_fields_that_all_engines_share_are_fields_of_sglang() -> None:
    for name in ALIKE:
        upstream_flags.check_field("sglang", name)


def test_devices_follow_from_the_groups() -> None:
    config = parse_args(["--engine-group", "a:num_gpus=4,per_engine=2", "--engine-group", "b:num_gpus=1,role=eval"])
    assert (config.cluster.rollout_num_gpus, config.eval.eval_num_gpus) == (4, 1)
    assert not {"rollout_num_gpus", "eval_num_gpus"} & set(config.given())
    assert parse_args(["--engine-group", "a:num_gpus=1,role=eval"]).cluster.rollout_num_gpus is None
    with pytest.raises(CommandLineError, match="--engine-group: it needs a value"):
        parse_args(["--engine-group"])
