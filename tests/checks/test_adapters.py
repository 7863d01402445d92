"""What does not go with adapters is refused by name, and what the literature advises against is warned of."""

import re
from unittest.mock import ANY

import pytest

from fusionrl.checks.training import adapter_errors, adapter_warnings, stack_warnings
from fusionrl.checks.validate import elsewhere_errors
from fusionrl.config.config import Config
from fusionrl.config.parser import read_args
from fusionrl.models.shape import shape_from_hf_config
from fusionrl.plan.plan import plan_errors
from fusionrl.plan.trained_parts import adapter_push, adapter_slots
from tests.plan.shapes import SMALL

SHAPE = shape_from_hf_config(SMALL)
GPT_OSS = shape_from_hf_config(
    SMALL | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
)


def config_of(*flags: str) -> Config:
    words = ["--lora-rank", "8", "--lr", "1e-4", "--rollout-batch-size", "8", "--num-rollout", "1", *flags]
    config, errors = read_args([*words, "--hf-checkpoint", "model", "--rollout-max-response-len", "8"])
    assert errors == []
    return config


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--tp-comm-overlap", "--tp-comm-overlap with --lora-rank 8: layers are then not called one by one"),
        ("--moe-shared-expert-overlap", "--moe-shared-expert-overlap with --lora-rank 8"),
        ("--cuda-graph-impl local", "--cuda-graph-impl with --lora-rank 8"),
        ("--moe-router-bias-update-rate 0.001", "--moe-router-bias-update-rate with --lora-rank 8: it changes weights"),
        ("--enable-mtp-training", "--enable-mtp-training with --lora-rank 8: layers of multi-token prediction"),
        ("--freeze-params-name-list a", "--freeze-params-name-list with --lora-rank 8: adapters alone are trained"),
        ("--update-weight-transport disk --update-weight-mode delta", "--update-weight-mode delta with --lora-rank 8"),
        ("--use-kl-loss --ref-load other", "--ref-load other: the reference of adapters is the model without them"),
        ("--lora-adapters a b --advantage-estimator ppo", "--advantage-estimator ppo with --lora-rank 8: one critic"),
        ("--lora-adapters a b --optimizer-cpu-offload", "--optimizer-cpu-offload with --lora-rank 8"),
        ("--lora-adapters a b --lora-adapter-path x", "--lora-adapter-path with --lora-rank 8: --lora-adapters names"),
        ("--mode eval", "--lora-rank 8: nothing is trained, and no folder has the adapter policy; give --lora-adapter"),
        ("--mode reject-sampling --lora-adapters a=x b", "--lora-rank 8: nothing is trained, and no folder has the"),
        ("--debug-rollout-only", "--lora-rank 8: nothing is trained, and no folder has the adapter policy"),
    ],
)
def test_what_does_not_go_with_adapters(flags: str, error: str) -> None:
    (found,) = adapter_errors(config_of(*flags.split()))
    assert found.startswith(error)


def test_what_goes_with_adapters() -> None:
    delta = "--update-weight-transport disk --update-weight-mode delta --lora-push merged"
    for flags in ("--use-kl-loss --ref-load model", "--advantage-estimator ppo", "--cuda-graph-impl none", delta):
        assert adapter_errors(config_of(*flags.split())) == []
    assert "without --lora-rank" in " ".join(elsewhere_errors(Config.from_flat({"lora_dropout": 0.1}), SHAPE))


def test_adapters_of_folders_are_served_without_trainers() -> None:
    """Those that engines can take: the others are merged by trainers."""
    for flags in ("--mode eval", "--mode reject-sampling --no-trainer", "--debug-rollout-only"):
        config = config_of("--lora-adapters", "a=x", "b=y", "--lora-push", "merged", *flags.split())
        assert adapter_errors(config) + adapter_warnings(config) == [] == plan_errors(config, 0, SHAPE)
        assert adapter_push(config, SHAPE) == ("adapter", ANY) and adapter_slots(config, None) == 3
        config = config_of("--lora-adapter-path", "x", "--sglang-speculative-algorithm", "NGRAM", *flags.split())
        (error,) = plan_errors(config, 0, SHAPE)
        assert error.startswith("--lora-rank 8: no trainer merges the adapter, and engines that speculate draft")
        assert "`fusionrl export --merge`" in error
    config = config_of("--mode", "reject-sampling", "--lora-adapter-path", "x", "--lora-push", "merged")
    assert adapter_errors(config) == [] and adapter_push(config, SHAPE) == ("merged", "--lora-push merged")


def test_other_kinds_of_adapters_are_refused_with_a_reason() -> None:
    (error,) = read_args(["--lora-rank", "8", "--lora-init", "OLoRA"])[1]
    assert error.startswith("--lora-init OLoRA: only LoRA with zeros in B") and error.endswith("give kaiming")


def test_names_of_modules() -> None:
    assert config_of("--target-modules", "q_proj,k_proj", "o_proj").lora.target_modules == [
        "q_proj",
        "k_proj",
        "o_proj",
    ]
    (error,) = plan_errors(config_of("--target-modules", "qproj"), 0, SHAPE)
    assert re.search(r"--target-modules qproj: no linear layer .* known are down_proj, .* linear_qkv", error)
    (error,) = plan_errors(config_of("--target-modules", "gate_up_proj"), 0, GPT_OSS)
    assert "its experts get no adapters" in error


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--lr 1e-6", "--lr 1e-06 with --lora-rank: adapters learn best at about ten times the rate"),
        ("--target-modules q_proj,v_proj", "--target-modules q_proj v_proj: adapters on attention alone learn less"),
        ("--exclude-modules linear_fc1,linear_fc2", "--target-modules all-linear"),
        ("", None),
        ("--target-modules linear_fc1", None),
        ("--lr 1e-6 --lora-rank 0", None),
    ],
)
def test_advice(flags: str, warning: str | None) -> None:
    found = adapter_warnings(config_of(*flags.split()))
    assert len(found) == (warning is not None)
    assert warning is None or found[0].startswith(warning)


def test_experts_in_stacks() -> None:
    assert stack_warnings(config_of(), SHAPE) == []
    assert "the experts of gpt_oss get no adapters" in stack_warnings(config_of(), GPT_OSS)[0]
    assert stack_warnings(config_of("--target-modules", "q_proj"), GPT_OSS) == []
