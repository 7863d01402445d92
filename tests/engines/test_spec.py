"""The command line and environment of an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusionrl.engines.spec import LOADER, EngineSpec, server_command, server_environment, to_flags


def make_spec(**changes: Any) -> EngineSpec:
    values: dict[str, Any] = {
        "index": 0,
        "model_path": "org/model",
        "device": "cuda",
        "dtype": "bfloat16",
        "tp_size": 2,
        "gpu_ids": (4, 6),
        "host": "127.0.0.1",
        "api_key": "secret",
        "log_dir": "logs",
        "seed": 3,
    }
    return EngineSpec(**{**values, **changes})


def _options(command: list[str]) -> dict[str, str]:
    return {
        flag: command[i + 1] if i + 1 < len(command) else "" for i, flag in enumerate(command) if flag.startswith("--")
    }


def test_flags_of_every_kind_of_value() -> None:
    arguments = {"a_b": 1, "on": True, "off": False, "unset": None, "many": [1, "x"], "table": {"k": [1]}}
    assert to_flags(arguments) == ["--a-b", "1", "--on", "--many", "1", "x", "--table", '{"k": [1]}']


def test_gpu_engine_names_its_devices_and_has_no_cpu_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = server_command(make_spec(), 1234, 1235)
    options = _options(command)
    assert options["--base-gpu-id"] == "4"
    assert options["--gpu-id-step"] == "2"
    assert "--attention-backend" not in options
    assert "--max-total-tokens" not in options
    assert "--custom-weight-loader" not in options
    assert "secret" not in " ".join(command)  # `ps` shows command lines to everybody
    env = server_environment(make_spec())
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert "secret" not in env.values()  # it goes by standard input


def test_user_arguments_win_over_defaults() -> None:
    own = {"sleep_on_idle": False, "max_total_tokens": 99, "attention_backend": "x", "custom_weight_loader": ["a.b"]}
    command = server_command(make_spec(device="cpu", server_args=own), 1, 2)
    options = _options(command)
    assert options["--max-total-tokens"] == "99"
    assert options["--attention-backend"] == "x"
    assert "--sleep-on-idle" not in options
    place = command.index("--custom-weight-loader")
    assert command[place + 1 : place + 3] == ["a.b", LOADER]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"server_args": {"port": 1, "tp_size": 2}}, "--sglang-port, --sglang-tp-size"),
        ({"gpu_ids": (0,)}, "gpu_ids"),
        ({"gpu_ids": (0, 1, 5), "tp_size": 3}, "evenly spaced"),
        ({"device": "npu"}, "npu"),
    ],
)
def test_mistakes_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_spec(**changes)


def test_what_prints_a_spec_does_not_print_the_key() -> None:
    """Ray's messages and tracebacks show it."""
    from fusionrl.buffer.actor import EngineEndpoints

    assert "secret" not in repr(make_spec(device="cpu"))
    assert "k3y" not in repr(EngineEndpoints(api_key="k3y"))


def test_cpu_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS", raising=False)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    env = server_environment(make_spec(device="cpu", model_path=str(tmp_path), num_threads=1))
    assert env["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    skipped = env["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert "qwen3" not in skipped
    assert "transformers" not in skipped
    assert "llama" in skipped


def test_a_model_that_only_reads_takes_as_many_tokens_as_it_has_positions(tiny_model: Path) -> None:
    """SGLang keeps places free for tokens to be generated, and would refuse the policy's longest samples."""
    spec = make_spec(model_path=str(tiny_model), role="teacher")
    assert _options(server_command(spec, 1, 2))["--context-length"] == str(2048 + 7)
    assert server_environment(spec)["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
    own = make_spec(model_path=str(tiny_model), role="teacher", server_args={"context_length": 512})
    assert _options(server_command(own, 1, 2))["--context-length"] == "512"
    policy = make_spec(model_path=str(tiny_model))
    assert "--context-length" not in _options(server_command(policy, 1, 2))
    assert spec.name == "teacher 0" and policy.name == "engine 0"
