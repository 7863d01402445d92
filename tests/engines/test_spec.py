"""The command line and environment of an engine."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.config import upstream_flags
from fusionrl.engines.spec import LOADER, EngineSpec, server_command, server_environment, to_flags
from fusionrl.plan.placement import FP32_ATTENTION


def make_spec(**changes: Any) -> EngineSpec:
    values: dict[str, Any] = {"index": 0, "model_path": "org/model", "device": "cuda", "dtype": "bfloat16"}
    values |= {"tp_size": 2, "gpu_ids": (4, 6), "host": "127.0.0.1", "api_key": "secret", "log_dir": "logs", "seed": 3}
    return EngineSpec(**{**values, **changes})


def _options(command: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in zip(command, [*command[1:], ""], strict=True) if flag.startswith("--")}


def test_flags_of_every_kind_of_value() -> None:
    arguments = {"a_b": 1, "on": True, "off": False, "unset": None, "many": [1, "x"], "table": {"k": [1]}}
    assert to_flags(arguments) == ["--a-b", "1", "--on", "--many", "1", "x", "--table", '{"k": [1]}']
    assert to_flags({"hooks": [{"k": [1]}]}) == ["--hooks", '[{"k": [1]}]'], "a list of objects is one value"


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--forward-hooks", ['[{"name": "h"}]']),
        ("--decoupled-spec-connect-endpoints", ['["a", "b"]']),
        ("--bucket-time-to-first-token", ["0.1", "1.0"]),
    ],
)
def test_lists_reach_sglang_as_they_were_given(option: str, values: list[str]) -> None:
    """Some lists are one JSON text for SGLang, others are several values."""
    fields = upstream_flags.parse_with(upstream_flags.sglang_parser(), option, values, upstream_flags.SGLANG_OWNED)
    found, given = [
        upstream_flags._import_sglang_parser().parse_args([*x]) for x in (to_flags(fields), [option, *values])
    ]
    name = next(iter(fields))
    assert isinstance(getattr(given, name), list) and getattr(found, name) == getattr(given, name)


def test_gpu_engine_names_its_devices_and_has_no_cpu_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g")
    command = server_command(make_spec(), 1234, 1235)
    options = _options(command)
    assert (options["--base-gpu-id"], options["--gpu-id-step"]) == ("4", "2")
    assert not {"--attention-backend", "--max-total-tokens", "--custom-weight-loader"} & set(options)
    assert "secret" not in " ".join(command)  # `ps` shows command lines to everybody
    env = server_environment(make_spec())
    assert env["CUDA_VISIBLE_DEVICES"].startswith("GPU-a,")  # the list by which its actor counts, and the trainers
    assert "secret" not in env.values()  # it goes by standard input


def test_a_gpu_engine_in_fp32_takes_no_kernel_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang itself would take FlashAttention 3 on Hopper, and norms that know no fp32."""
    monkeypatch.delenv("SGLANG_FORCE_FUSED_OP_BACKEND", raising=False)
    spec = make_spec(dtype="float32")
    command = server_command(spec, 1, 2)
    options = _options(command)
    assert (options["--attention-backend"], options["--sampling-backend"]) == ("torch_native", "pytorch")
    assert "--disable-cuda-graph" in command and "--max-total-tokens" not in command
    assert server_environment(spec)["SGLANG_FORCE_FUSED_OP_BACKEND"] == "torch"
    own = server_command(make_spec(dtype="float32", server_args={"attention_backend": "triton"}), 1, 2)
    assert _options(own)["--attention-backend"] == "triton"
    assert "SGLANG_FORCE_FUSED_OP_BACKEND" not in server_environment(make_spec())


def test_sglang_has_what_fp32_needs() -> None:
    """Names of its own, as its sources have them: back ends, and the variable that puts torch in a kernel's place."""
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.origin is not None
    root = Path(package.origin).parent
    registry = (root / "srt/layers/attention/attention_registry.py").read_text()
    assert all(f'register_attention_backend("{name}")' in registry for name in FP32_ATTENTION)
    assert 'TORCH = "torch"' in (root / "kernels/spec.py").read_text()
    assert "SGLANG_FORCE_FUSED_OP_BACKEND" in (root / "srt/environ.py").read_text()
    norms = {"layernorm": "RMSNorm", "activation": "SiluAndMul", "rotary_embedding/base": "RotaryEmbedding"}
    for file, name in norms.items():
        assert f"class {name}(BaseFusedOp)" in (root / "srt/layers" / f"{file}.py").read_text()


def test_user_arguments_win_over_defaults() -> None:
    assert _options(server_command(make_spec(device="cpu"), 1, 2))["--attention-backend"] == "torch_batched"
    own = {"sleep_on_idle": False, "max_total_tokens": 99, "attention_backend": "x", "custom_weight_loader": ["a.b"]}
    command = server_command(make_spec(device="cpu", server_args=own), 1, 2)
    options = _options(command)
    assert (options["--max-total-tokens"], options["--attention-backend"]) == ("99", "x")
    assert "--sleep-on-idle" not in options
    place = command.index("--custom-weight-loader")
    assert command[place + 1 : place + 3] == ["a.b", LOADER]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"gpu_ids": (0,)}, "gpu_ids"),
        ({"gpu_ids": (0, 1, 5), "tp_size": 3}, "evenly spaced"),
        ({"gpu_ids": (0, 1), "tp_size": 2, "num_nodes": 2}, "1 devices on this node"),
        ({"tp_size": 3, "num_nodes": 2}, "not a multiple of 2 nodes"),
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
    assert (env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"]) == ("1", "1")
    assert env["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    skipped = set(env["SGLANG_DISABLED_MODEL_ARCHS"].split(","))
    assert not {"qwen3", "transformers"} & skipped
    assert {"llama", "internvl"} <= skipped, "internvl only names the architecture; qwen3 has it"


def test_an_architecture_that_no_file_serves_leaves_those_that_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a file takes over from another one."""
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS", raising=False)
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("")
    (models / "one.py").write_text("class One:\n    pass\n\n\nEntryClass = [One]\n")
    (models / "two.py").write_text("from one import One\n\n\nclass Two(One):\n    pass\n\n\nEntryClass = Two\n")
    (models / "three.py").write_text("from two import Two, Other\n\nEntryClass = [Other]\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(models.parents[1] / "x")))
    found = {}
    for name in ("One", "Two", "Other", "None"):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        env = server_environment(make_spec(device="cpu", model_path=str(tmp_path), num_threads=1))
        found[name] = env.get("SGLANG_DISABLED_MODEL_ARCHS")
    assert found == {"One": "three,two", "Two": "one,three", "Other": "one,two", "None": None}


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


def test_an_engine_over_two_nodes_is_told_its_place_and_where_its_ranks_meet() -> None:
    changes: dict[str, Any] = {"tp_size": 4, "num_nodes": 2}
    head = make_spec(**changes, gpu_ids=(6, 7))
    part = make_spec(**changes, gpu_ids=(0, 1), node_rank=1, host="10.0.0.2")
    wanted = {"--tp-size": "4", "--nnodes": "2", "--dist-init-addr": "10.0.0.1:77"}
    for spec, rank, base in ((head, "0", "6"), (part, "1", "0")):
        options = _options(server_command(spec, 1, 2, "10.0.0.1:77"))
        assert {name: options[name] for name in wanted} == wanted
        assert (options["--node-rank"], options["--base-gpu-id"], options["--gpu-id-step"]) == (rank, base, "1")
        assert server_environment(spec)["FUSIONRL_ENGINE_NODES"] == "2"
    assert (head.name, part.name) == ("engine 0", "engine 0 part 1")
    assert (head.log_name, part.log_name) == ("engine-0.log", "engine-0-part-1.log")
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(server_command(make_spec(), 1, 2))
    assert "FUSIONRL_ENGINE_NODES" not in server_environment(make_spec()), "on one node"


def test_each_part_binds_the_threads_of_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang numbers a node's ranks from 0 when it looks for their cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    parts = [
        make_spec(device="cpu", tp_size=4, gpu_ids=(), num_nodes=2, node_rank=rank, num_threads=2) for rank in (0, 1)
    ]
    assert [server_environment(part)["SGLANG_CPU_OMP_THREADS_BIND"] for part in parts] == ["0,1|2,3", "4,5|6,7"]
