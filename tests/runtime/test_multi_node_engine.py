"""An engine over several nodes: its parts, and what becomes of it when one of them ends. Ray and processes are real,
the servers are a few lines that answer health checks."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fusionrl.config.config import Config, PassThrough
from fusionrl.config.engine_groups import EngineGroup, read_groups
from fusionrl.engines.process import ChildProcess, base_url
from fusionrl.engines.spec import EngineSpec, server_command
from fusionrl.models.shape import read_model_shape
from fusionrl.pipeline.knobs import Knobs
from fusionrl.plan.devices import Gpu
from fusionrl.plan.push_plan import place_over
from fusionrl.runtime.actor_process import ProcessSettings
from fusionrl.runtime.engine_specs import engine_specs, policy_server_args
from fusionrl.runtime.external_engines import engine_requirements
from fusionrl.runtime.multi_node_engine import EnginePartWorker, MultiNodeEngineWorker
from fusionrl.runtime.ray_cluster import Bundle
from tests import tiny_vision
from tests.models.test_families import shape_of
from tests.own_process import wait_until

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    do_POST = do_GET
    def log_message(self, *_): pass
if "fail" in sys.argv:
    sys.exit("no such model")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def spawn(worker: Any, port: int, _: int, meeting: str | None, *__: int | None) -> ChildProcess:
    """In the place of SGLang's server: one that notes where it was to meet, and may end at once."""
    worker.url = base_url(worker.spec.host, port)
    log = Path(worker.spec.log_dir)
    (log / f"{worker.spec.node_rank}.meeting").write_text(str(meeting))
    fails = [name for name in ("fail",) if (log / f"{worker.spec.node_rank}.fails").exists()]
    return ChildProcess([sys.executable, "-c", SERVER, str(port), str(log), *fails], log / worker.spec.log_name)


class Part(EnginePartWorker):
    _spawn_server = spawn  # type: ignore[assignment]


class Head(MultiNodeEngineWorker):
    _spawn_server = spawn  # type: ignore[assignment]


pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("shared_cluster")]


class Engine:
    """An engine of two parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        head = EngineSpec(
            *(3, "none", "cpu", "float32", 2, (), "127.0.0.1", "key", str(folder), 1), start_timeout_s=30.0, num_nodes=2
        )
        settings, options = ProcessSettings(0o22), {"num_cpus": 0, "max_concurrency": 8}
        part = dataclasses.replace(head, node_rank=1)
        self.part: Any = ray.remote(Part).options(**options).remote(part, str(folder / "part.log"), settings)
        self.head: Any = (
            ray.remote(Head).options(**options).remote(head, str(folder / "head.log"), settings, [self.part])
        )

    def servers(self) -> list[int]:
        """Pids of its servers that live."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                if entry.name.isdigit() and command[1:2] == [b"-c"] and str(self.folder).encode() in command:
                    found.append(int(entry.name))
            except OSError:
                continue
        return sorted(found)

    def wait_fault(self) -> str:
        wait_until(lambda: ray.get(self.head.fault.remote()) is not None)
        return str(ray.get(self.head.fault.remote()))


def test_both_parts_start_meet_and_end(tmp_path: Path) -> None:
    """A part that cannot start ends the start with its log; the next try may go well."""
    (tmp_path / "1.fails").touch()
    engine = Engine(tmp_path)
    with pytest.raises(RuntimeError, match=r"start of engine 3 part 1 (?s:.*) no such model|no such model"):
        ray.get(engine.head.start.remote(), timeout=30)
    assert engine.servers() == []
    (tmp_path / "1.fails").unlink()
    url = ray.get(engine.head.start.remote(), timeout=30)
    meetings = [(tmp_path / f"{rank}.meeting").read_text() for rank in (0, 1)]
    assert meetings[0] == meetings[1] and meetings[0].startswith("127.0.0.1:") and meetings[0] not in url
    assert len(engine.servers()) == 2 and ray.get(engine.head.fault.remote()) is None
    ray.get(engine.head.shutdown.remote(0.0))
    assert engine.servers() == []


@pytest.mark.parametrize("who", ["server", "actor"])
def test_it_ends_as_a_whole_when_another_part_dies(who: str, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    ray.get(engine.head.start.remote(), timeout=30)
    if who == "server":
        (pid,) = set(engine.servers()) - {ray.get(engine.head.__ray_call__.remote(lambda actor: actor._server.pid))}
        os.kill(pid, signal.SIGKILL)
    else:
        ray.kill(engine.part)
    fault = engine.wait_fault()
    assert fault.startswith("generation: engine 3 is one over 2 nodes, and ended: ")
    assert "engine 3 part 1" in fault if who == "server" else "part 1 is dead" in fault
    wait_until(lambda: not engine.servers())


# ------------------------------------------------------------------------------------ placement
def places(*nodes: str) -> list[Bundle]:
    """Devices on these nodes, numbered from 0 on each."""
    return [
        Bundle(i, i, node, f"10.0.0.{node}", Gpu(nodes[:i].count(node), nodes[:i].count(node)))
        for i, node in enumerate(nodes)
    ]


def specs(
    *nodes: str, config: Config | None = None, groups: Sequence[EngineGroup] = (), index: int = 0
) -> list[EngineSpec]:
    facts = {"device": "cuda", "rollout_dtype": "bf16", "engines_give_memory": False, "knobs": None}
    plan: Any = SimpleNamespace(scorers=(), transport="broadcast", shape=SimpleNamespace(vision=None), **facts)
    plan.group_of, plan.lora_push = lambda engine: groups[engine] if groups else None, None
    return engine_specs(
        *(config or Config.from_flat({"hf_checkpoint": "org/model"}), plan, "engine", index, places(*nodes)),
        host_of=lambda bundle: bundle.node_address,
        api_key=None,
        log_dir="logs",
    )


def test_a_part_for_each_node_with_its_own_devices() -> None:
    found = specs("1", "1", "2", "2")
    assert [(s.num_nodes, s.node_rank, s.host, s.gpu_ids) for s in found] == [
        (2, 0, "10.0.0.1", (0, 1)),
        (2, 1, "10.0.0.2", (0, 1)),
    ]
    assert [s.tp_size for s in found] == [4, 4] and found[0].seed == found[1].seed
    assert [s.num_nodes for s in specs("1", "1")] == [1]
    # On a CPU a sender writes into memory that the engines of its own node map; this engine gets values.
    assert place_over(["a", "a", "b"]) not in ("a", "b") and place_over(["a", "a"]) == "a"
    with pytest.raises(ValueError, match="--rollout-num-gpus-per-engine 3: engine 0 has 2, 1 devices on its nodes"):
        specs("1", "1", "2")


# ------------------------------------------------------------------------------------ groups
def test_an_engine_s_group_adds_its_flags_and_its_role() -> None:
    """A flag of the group goes before the run's; the run's others hold for all."""
    texts = ["a:num_gpus=1,role=prefill,max-running-requests=8", "b:num_gpus=1,role=decode"]
    groups = read_groups(tuple(texts), 1)
    config = Config.from_flat(
        {"hf_checkpoint": "org/model"}, PassThrough(sglang={"max_running_requests": 32, "log_level": "warning"})
    )
    made = [specs("1", config=config, groups=groups, index=index)[0] for index in (0, 1)]
    wanted = {"log_level": "warning", "max_running_requests": 8, "disaggregation_mode": "prefill"}
    assert made[0].server_args.items() >= wanted.items() and made[0].meets_decoders
    assert made[1].server_args["max_running_requests"] == 32
    assert made[1].server_args["disaggregation_mode"] == "decode" and not made[1].meets_decoders
    command = server_command(made[0], 1, 2, None, 77)
    assert command[command.index("--disaggregation-bootstrap-port") + 1] == "77"
    assert command[command.index("--disaggregation-mode") + 1] == "prefill"


# ------------------------------------------------------------------------ fields that other flags need
CASES = [
    ("disable-radix-cache", {"pause_generation_mode": "in_place"}),
    ("incremental-streaming-output", {"stream_responses": True}),
]


def group_args(group: str, **values: Any) -> dict[str, object]:
    groups = read_groups((f"g:num_gpus=1{group}",), 1)
    plan: Any = SimpleNamespace(group_of=lambda index: groups[0], engines_give_memory=False, device="cpu", knobs=None)
    plan.shape, plan.lora_push = SimpleNamespace(vision=None), None
    return policy_server_args(Config.from_flat(values), plan, 0)


@pytest.mark.parametrize(("switch", "flags"), CASES)
def test_a_group_cannot_switch_off_what_the_run_needs(switch: str, flags: dict[str, Any]) -> None:
    name = switch.replace("-", "_")
    assert group_args("", **flags)[name] is True and group_args(f",{switch}=true", **flags)[name] is True
    with pytest.raises(ValueError, match=f"--engine-group g: {switch}=false: .*; leave it out"):
        group_args(f",{switch}=false", **flags)
    assert group_args(f",{switch}=false", pause_generation_mode="abort")[name] is False


def test_engines_serve_the_adapters_that_are_pushed() -> None:
    """Of each name the versions that may run at once, and the weights; the user's flags do not contradict."""
    plan: Any = SimpleNamespace(group_of=lambda index: None, lora_push="adapter", shape=shape_of("qwen3"))

    def args(device: str, knobs: Any = None, sglang: dict[str, Any] | None = None) -> dict[str, object]:
        plan.device, plan.engines_give_memory, plan.knobs = device, device == "cuda", knobs
        values = {"lora_rank": 8, "target_modules": ["q_proj", "linear_fc1"], "pause_generation_mode": "in_place"}
        return policy_server_args(Config.from_flat(values, PassThrough(sglang=sglang or {})), plan, 0)

    here, there = (
        args("cpu", Knobs(groups_per_fetch=1, max_staleness=2, admission_lead=1.0, in_flight="in_place")),
        args("cuda"),
    )
    assert here["lora_target_modules"] == ["gate_proj", "q_proj", "up_proj"] and here["max_lora_rank"] == 8
    assert (here["max_loras_per_batch"], there["max_loras_per_batch"]) == (5, 3)
    assert here["lora_backend"] == "torch_native" and "lora_backend" not in there, "SGLang's own on a GPU"
    assert there["enable_weights_cpu_backup"] and not here.get("disable_radix_cache")
    for name in ("max_loras_per_batch", "max_loaded_loras"):
        with pytest.raises(ValueError, match=f"--sglang-{name.replace('_', '-')}: .*leave it out"):
            args("cpu", sglang={name: 1})


def test_engines_of_gpt_oss_record_the_experts_that_trainers_replay(tmp_path: Path) -> None:
    """SGLang's choice for it, triton_kernel, records none: each token would seem to go to expert 0."""
    plan: Any = SimpleNamespace(group_of=lambda index: None, engines_give_memory=False, device="cuda", knobs=None)
    plan.quantization, plan.rollout_dtype, plan.transport, plan.lora_push = None, "bf16", "broadcast", None
    (tmp_path / "config.json").write_text("{}")

    def args(family: str, **sglang: Any) -> dict[str, object]:
        plan.shape = shape_of(family)
        values = {"use_rollout_routing_replay": True, "hf_checkpoint": str(tmp_path)}
        config = Config.from_flat(values, PassThrough(sglang=sglang))
        of_external = engine_requirements(config, plan, True).flags
        own = policy_server_args(config, plan, 0)
        assert of_external.items() <= own.items() and of_external.get("moe_runner_backend") == own.get(
            "moe_runner_backend"
        )
        return own

    assert args("gpt_oss")["moe_runner_backend"] == "triton" and "moe_runner_backend" not in args("qwen3_moe")
    assert args("gpt_oss", moe_runner_backend="cutlass")["moe_runner_backend"] == "cutlass"
    with pytest.raises(ValueError, match="--sglang-moe-runner-backend=triton_kernel: its kernel records no experts"):
        args("gpt_oss", moe_runner_backend="triton_kernel")


def test_external_engines_serve_the_whole_of_a_model_that_sees(tmp_path: Path) -> None:
    """With the limits of the run's images; Qwen3.5 without images is its text part, of another class."""
    raw = tiny_vision.config_of("qwen3_5").to_dict() | {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    numbers = tiny_vision.image_numbers("qwen3_5")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(numbers))
    plan: Any = SimpleNamespace(group_of=lambda index: None, engines_give_memory=False, device="cpu", knobs=None)
    plan.lora_push = None
    plan.quantization, plan.rollout_dtype, plan.transport = None, "fp32", "shm"
    flags = {"hf_checkpoint": str(tmp_path), "multimodal_keys": {"image": "x"}, "image_max_pixels": 64 * 64}
    for sees, name in ((True, "Qwen3_5ForConditionalGeneration"), (False, "Qwen3_5ForCausalLM")):
        plan.shape = read_model_shape(tmp_path, sees=sees)
        wanted = engine_requirements(Config.from_flat(flags), plan, True)
        limits = {"min_pixels": 32 * 32, "max_pixels": 64 * 64}
        assert wanted.flags.get("mm_process_config") == ({"image": limits} if sees else None)
        assert wanted.architectures == (name,) and (wanted.images is not None) == sees


def test_engines_do_not_read_mxfp4_that_trainers_push_otherwise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    model = {"hf_checkpoint": str(tmp_path)}
    for group in ("", ",load-format=dummy"):
        assert group_args(group, **model)["load_format"] == "dummy"
    with pytest.raises(ValueError, match="--engine-group g: load-format=auto: .* in MXFP4, .*; leave it out"):
        group_args(",load-format=auto", **model)
