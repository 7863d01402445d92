"""Which engines of others a run takes, and the one message for those that it does not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusionrl.engines.external_engine import AttachedEngine, EngineRequirements, misfits, other_weights
from fusionrl.engines.images import ImageSettings
from fusionrl.models.shape import read_model_shape
from tests.tiny_model import make_tiny_qwen3
from tests.trainer import hf_models

CLASSES = ("Qwen3ForCausalLM",)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> EngineRequirements:
    model = make_tiny_qwen3(tmp_path_factory.mktemp("model"))
    flags: dict[str, object] = {"disable_radix_cache": True}
    alike: dict[str, object] = {"quantization": None, "context_length": None}
    return EngineRequirements(str(model), CLASSES, read_model_shape(model), "float32", flags, alike)


def found(expected: EngineRequirements, model: dict[str, Any], **args: Any) -> list[str]:
    fits = {"version": "0.5.23", "dtype": "float32", "tp_size": 2, "disable_radix_cache": True}
    usual = {"model_path": expected.model_path, "is_generation": True, "architectures": list(CLASSES)}
    return misfits(usual | model, fits | args, expected)


def test_one_that_fits(expected: EngineRequirements) -> None:
    assert found(expected, {}) == []
    assert found(expected, {}, version="0.6.0.dev1+gabc", context_length=None, quantization=None) == []
    assert found(expected, {"model_path": "/on/another/host"}) == []


@pytest.mark.parametrize(
    ("model", "args", "told"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "(LlamaForCausalLM, not Qwen3ForCausalLM)"),
        ({"is_generation": False}, {}, "it does not generate"),
        ({}, {"version": "0.5.9"}, "its SGLang is 0.5.9; a push needs 0.5.17 or later"),
        ({}, {"quantization": "fp8"}, "its --quantization is fp8; start it without --quantization"),
        ({}, {"context_length": 64}, "its --context-length is 64; start it without --context-length"),
        ({}, {"dp_size": 2}, "--dp-size 2; a push reaches tensor-parallel ranks alone"),
        ({}, {"disable_radix_cache": False}, "start it with --disable-radix-cache, as this run's own engines are"),
        ({}, {"language_model_only": True}, "its --language-model-only True: the engines would not see; leave it out"),
        ({}, {"mm_process_config": {}}, 'start it with --mm-process-config {"image": {"max_pixels": 9}}, as this'),
    ],
)
def test_one_that_does_not(
    expected: EngineRequirements, model: dict[str, Any], args: dict[str, Any], told: str
) -> None:
    limits = {"mm_process_config": {"image": {"max_pixels": 9}}}
    sees = replace(expected, images=ImageSettings(True, max_pixels=9), flags=expected.flags | limits)
    (message,) = found(sees, model, **limits | args)
    assert told in message


def test_a_model_of_another_size(expected: EngineRequirements, tmp_path: Path) -> None:
    other = make_tiny_qwen3(tmp_path / "other", num_layers=3)
    (message,) = found(expected, {"model_path": str(other)})
    assert message == (
        f"it serves {other}, another model than --hf-checkpoint {expected.model_path} (num_layers 3, not 2)"
    )
    config = json.loads((other / "config.json").read_text())
    gated = expected.shape.attention[1].model_copy(update={"gated": True})
    own = expected.shape.model_copy(update={"attention": (expected.shape.attention[0], gated)})
    (message,) = found(replace(expected, shape=own), {})
    assert " (attention of layer 1 {'kind': 'full', " in message and "'gated': True" in message
    (other / "config.json").write_text(json.dumps(config | {"model_type": "strange"}))
    (message,) = found(expected, {"model_path": str(other)})
    assert message.startswith(f"it serves {other}, another model than")


def test_one_that_reads_the_same_config_otherwise(expected: EngineRequirements, tmp_path: Path) -> None:
    """SGLang takes a default where it misses a field; the run's own engines get it by a flag."""
    config = json.loads(Path(expected.model_path, "config.json").read_text())
    rope = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    olmo = config | {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "sliding_window": 8} | rope
    (tmp_path / "config.json").write_text(json.dumps(olmo))
    run = replace(expected, model_path=str(tmp_path), architectures=("Olmo2ForCausalLM",), alike={})
    run = replace(run, shape=read_model_shape(tmp_path), overrides={"quantization_config": None})
    model = {"architectures": ["Olmo2ForCausalLM"], "model_path": str(tmp_path)}
    cure = {"quantization_config": None, "rope_theta": 5e5}
    for given in (None, "{}", '{"rope_theta": 500000.0}', '{"quantization_config": null}'):
        (message,) = found(run, model, json_model_override_args=given)
        assert "SGLang reads its config.json otherwise than trainers do" in message
        assert json.loads(message.split("'")[1]) == cure
    assert found(run, model, json_model_override_args=json.dumps(cure)) == []
    assert found(run, model | {"model_path": "/elsewhere"}, json_model_override_args=json.dumps(cure)) == []


def test_a_copy_of_the_folder_with_the_fields_of_the_runs_own_engines(tmp_path: Path) -> None:
    """GLM-5 is served as DeepSeek-V3, whose class SGLang chooses by config.json."""
    sizes = hf_models.COMMON | hf_models.SPARSE["glm_moe_dsa"] | {"model_type": "glm_moe_dsa"}
    for name in ("own", "copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes))
    own, copy = str(tmp_path / "own"), str(tmp_path / "copy")
    run = EngineRequirements(own, ("DeepseekV3ForCausalLM",), read_model_shape(own), "float32")
    (message,) = found(run, {"architectures": ["GlmMoeDsaForCausalLM"], "model_path": copy})
    assert "start it on a copy of the folder with these fields in config.json: {" in message
    fields = json.loads(message.partition("config.json: ")[2])
    served = {"architectures": ["DeepseekV3ForCausalLM"], "model_path": copy}
    for changed, told in ((fields, []), (fields | {"num_hidden_layers": 3}, ["(num_layers 3, not 2)"])):
        (tmp_path / "copy" / "config.json").write_text(json.dumps(sizes | changed))
        messages = found(run, served)
        assert len(messages) == len(told) and all(map(str.__contains__, messages, told)), messages


def test_the_precision_auto_is_the_checkpoints_but_never_fp32(expected: EngineRequirements, tmp_path: Path) -> None:
    bf16 = replace(expected, dtype="bfloat16")
    config = json.loads(Path(expected.model_path, "config.json").read_text())
    for named, wanted, told in (
        ("bfloat16", bf16, None),
        ("bfloat16", expected, "it computes in bfloat16; start it with --dtype float32"),
        ("float32", expected, "it computes in float16; start it with --dtype float32"),
        (None, bf16, "it computes in a precision that cannot be read here (--dtype auto); start it with --dtype bfl"),
    ):
        config.pop("torch_dtype", None)
        (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": named}))
        messages = found(wanted, {"model_path": str(tmp_path)}, dtype="auto")
        assert [message.startswith(str(told)) for message in messages] == ([True] if told else []), messages


def test_weights_where_no_push_comes() -> None:
    own = [{"a": "1", "b": "2"}]
    assert other_weights([{"b": "2", "a": "1"}], own) is None
    assert "1 tensors of the engine differ from --hf-checkpoint (b)" in str(other_weights([{"a": "1", "b": "3"}], own))
    assert "start it with --tp-size 1" in str(other_weights(own * 2, own))
    assert "no checksums here" in str(other_weights(None, own)) and "no checksums" in str(other_weights(own, None))


def test_one_out_of_reach(expected: EngineRequirements) -> None:
    """It is not even asked."""
    far = AttachedEngine(0, "http://203.0.113.7:1", 1)
    with pytest.raises(ValueError, match="on another machine, and this run listens on loopback alone"):
        far.join(replace(expected, only_here=True))
    with pytest.raises(ValueError, match="weights go by CUDA IPC"):
        far.join(replace(expected, by_ipc=True))
