"""The memory estimate: its parts by hand, its verdict, and the change that it proposes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import Config, PassThrough
from fusionrl.models.families import model_rules
from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.plan.devices import GIB, KINDS, Machine, host_memory
from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.plan.memory.activations import Recompute, TrainingOptions, kinds_of, layer_bytes
from fusionrl.plan.memory.advice import changes
from fusionrl.plan.memory.bars import ENGINE_PROCESS, GPU_PROCESS
from fusionrl.plan.memory.engine import engine_memory, kv_bytes, prefill_chunk, request_bytes, static_fraction
from fusionrl.plan.memory.report import MemoryReport
from fusionrl.plan.memory.states import StateOptions, stage_parameters, state_bytes
from fusionrl.plan.memory.trainer import (
    BLOCK_BYTES,
    KEPT_BYTES,
    block_sizes,
    head_bytes,
    in_flight,
    trainer_memory,
)
from fusionrl.plan.plan import Plan, make_plan
from fusionrl.plan.push_plan import BUFFERS, plan_push, push_tensors, stage_of_rule
from fusionrl.plan.render import memory_warnings, render_plan
from tests.plan.shapes import SMALL

QWEN3_30B = shape_from_hf_config(json.loads((Path(__file__).parent / "qwen3_30b_a3b.json").read_text()))
RECIPES = Path(__file__).parents[1] / "recipes" / "configs"
QWEN3_5 = shape_from_hf_config(json.loads((RECIPES / "qwen3.5-35b-a3b.json").read_text()))
GPT_OSS = shape_from_hf_config(json.loads((RECIPES / "gpt-oss-20b.json").read_text()))
DENSE = shape_from_hf_config(SMALL)
WIDE = SMALL | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
SIZES_8B = {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
QWEN3_8B = shape_from_hf_config(WIDE | SIZES_8B)
BF16, FP32 = StateOptions.of("bf16", {}, {}), StateOptions.of("fp32", {}, {})
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OFFLOAD = {"optimizer_cpu_offload": True}
SFT = {"mode": "sft", "rollout_max_response_len": None}
EIGHT = {"actor_num_gpus_per_node": 8, "expert_model_parallel_size": 8}
FUSED = TrainingOptions("transformer_engine", "bf16", on_cpu=False, longest=4096, tokens=4096)


def states(shape: ModelShape, layout: TrainerLayout, options: StateOptions = BF16) -> Any:
    stages = stage_layers(layout, shape.num_layers, {})
    return [state_bytes(parameters, layout, options) for parameters in stage_parameters(shape, layout, stages)]


def plan(shape: ModelShape, memory: float, device: Any = "cuda", passed: Any = None, **values: Any) -> Plan:
    values = {"rollout_batch_size": 64, "num_rollout": 3, "rollout_max_response_len": 1024} | values
    config = Config.from_flat(values, passed)
    kind = {"device_memory": memory * GIB} if device == "cuda" else {"host_memory": memory * GIB}
    made = make_plan(config, shape, device=device, num_prompts=9, machine=Machine(device, "a box", **kind))
    assert "verdict" in render_plan(made, config)
    return made


def test_experts_are_divided_by_expert_parallelism_and_context_ranks_share_the_optimizer() -> None:
    """A 30B model's 29 B expert parameters dominate: at EP 8 a rank has an eighth of them."""
    experts = 48 * 128 * 3 * 2048 * 768
    dense = QWEN3_30B.num_parameters - experts
    layouts = (TrainerLayout(8), TrainerLayout(8, ep=8), TrainerLayout(8, cp=8), TrainerLayout(8, tp=2, ep=2, etp=2))
    one, eight, context, split = (states(QWEN3_30B, layout)[0] for layout in layouts)
    assert one.weights == pytest.approx(2 * (dense + experts), rel=1e-4)
    assert eight.weights == pytest.approx(2 * (dense + experts / 8), rel=1e-4)
    # No other rank has these experts: their states are whole, those of the dense part are shared by 8.
    assert eight.optimizer == pytest.approx(12 * (dense / 8 + experts / 8), rel=1e-4)
    assert context == one
    assert split.weights == pytest.approx(2 * (dense / 2 + experts / 4), rel=1e-2)  # norms and router are whole


def test_the_ends_of_a_pipeline_have_the_embedding_and_the_output_layer() -> None:
    table = 151936 * 2048
    counted = stage_parameters(QWEN3_30B, TrainerLayout(4, pp=4), [list(range(12 * s, 12 * s + 12)) for s in range(4)])
    layers = counted[1].count
    assert [parameters.count - layers for parameters in counted] == [table, 0, 0, table + 2048]
    tied = DENSE.model_copy(update={"tie_word_embeddings": True})
    both = stage_parameters(tied, TrainerLayout(2, pp=2), [[0, 1], [2, 3]])
    assert [sum(parameters.shared) for parameters in both] == [512 * 64, 512 * 64]
    critic = stage_parameters(DENSE.with_value_head(), TrainerLayout(2, pp=2), [[0, 1], [2, 3]])
    assert critic[0].count - critic[1].count == 512 * 64 - 64 - 64


def test_flags_of_the_optimizer_change_the_states() -> None:
    layout = TrainerLayout(1)
    offload = StateOptions.of("bf16", {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}, {})
    moments = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    lean = StateOptions.of("bf16", moments, {"grad_reduce_in_fp32": False})
    count = states(DENSE, layout)[0].weights // 2
    wanted = ((BF16, [2, 4, 12, 0]), (FP32, [4, 4, 8, 0]), (offload, [2, 4, 3, 9]), (lean, [2, 2, 8, 0]))
    for options, bytes_each in wanted:
        (made,) = states(DENSE, layout, options)
        found = [made.weights, made.gradients, made.optimizer, made.host_optimizer]
        assert found == [size * count for size in bytes_each]


def test_micro_batches_in_flight() -> None:
    """1F1B holds pp - stage; interleaving pp (1 + (pp - 1) / (pp v)) on the first stage; never more than there are."""
    layout, interleaved = TrainerLayout(4, pp=4), TrainerLayout(4, pp=4, vpp=2)
    assert [in_flight(layout, stage, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(layout, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    wanted = {(0, 16): 4 * (1 + 3 / (4 * 2)), (3, 16): 5 / 2, (0, 4): 4}
    assert {case: in_flight(interleaved, *case) for case in wanted} == wanted


def test_activations_fall_with_tensor_and_grow_with_tokens_but_not_with_context_parallelism() -> None:
    """Tokens are those of one rank: context parallelism does not divide them again."""

    def kept(tokens: int = 4096, **sizes: int) -> float:
        (stage,) = trainer_memory(DENSE, TrainerLayout(8, **sizes), replace(FUSED, tokens=tokens), BF16, {})
        return stage.activations - stage.head

    assert kept(tp=2) == pytest.approx(kept() / 2, rel=0.02)
    assert kept(cp=2) == kept() == kept(8192) / 2


def test_recompute_as_megatrons_flags_say() -> None:
    def kept(**fields: Any) -> tuple[float, float]:
        # The loss is not what needs most.
        options = replace(FUSED, recompute=Recompute.of(fields), chunk_size=1)
        (stage,) = trainer_memory(DENSE, TrainerLayout(1), options, BF16, fields)
        return (stage.activations - stage.head) / 4096 - 8, stage.transient

    none, full, by_two = kept(), kept(**FULL), kept(**FULL | {"recompute_num_layers": 2})
    block = kept(recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
    mlp = kept(recompute_granularity="selective", recompute_modules=["mlp"])
    assert (full[0], by_two[0]) == (4 * 2 * 64, 2 * 2 * 64)  # the hidden states that enter each layer
    assert block[0] == pytest.approx(3 * 2 * 64 + none[0] / 4)
    assert mlp[0] == pytest.approx(none[0] - 4 * 2 * (64 + 3 * 128))
    assert by_two[1] > full[1] > none[1]  # layers are alive again in backward


def test_a_busy_experts_rank_keeps_more() -> None:
    layout, uneven = TrainerLayout(8, ep=8), replace(FUSED, imbalance=1.5)
    (kinds,) = set(kinds_of(QWEN3_30B, range(48)))
    even, busy = (layer_bytes(QWEN3_30B, layout, options, kinds) for options in (FUSED, uneven))
    assert busy - even == 2 * 0.5 * 8 * (2 * 2048 + 3 * 768)


def test_the_loss_never_keeps_all_logits() -> None:
    """The trainer's own blocks; at 151936 tokens of vocabulary all logits of 8192 tokens would be 4.6 GiB."""
    width, num_kept = block_sizes(8192, 2048, 151936)
    assert 4 * 8192 * width == 2 * BLOCK_BYTES  # a block is as wide as the hidden states
    assert 4 * 8192 * width * num_kept == KEPT_BYTES
    options = replace(FUSED, tokens=8192)
    assert head_bytes(QWEN3_30B, 151936, options)[0] < 0.2 * GIB
    (stage,) = trainer_memory(QWEN3_30B, TrainerLayout(1), replace(options, whole_logits=True), BF16, {})
    assert stage.head > 4 * 8192 * 151936


def test_tokens_of_a_kv_cache() -> None:
    """Keys and values of 4 groups, 128 wide, in 48 layers; over 2 devices each has 2 groups, over 8 still one."""
    assert [kv_bytes(QWEN3_30B, size, 2) for size in (1, 2, 8)] == [2 * 48 * n * 128 * 2 for n in (4, 2, 1)]
    engine, twice = (
        engine_memory(QWEN3_30B, 60e9, 2, "bf16", args, device_memory=80 * GIB, on_cpu=False).kv_tokens
        for args in ({"mem_fraction_static": 0.8}, {"mem_fraction_static": 0.8, "kv_cache_dtype": "fp8_e4m3"})
    )
    assert engine == int((0.8 * 80 * GIB - 30e9) // (2 * 48 * 2 * 128 * 2))
    assert twice == pytest.approx(2 * engine, abs=1)
    assert all(0.5 < static_fraction(kind.memory, 1, prefill_chunk(kind.memory, {})) < 0.95 for kind in KINDS.values())


def test_an_engine_has_a_state_for_each_request() -> None:
    """Of Qwen3.5-35B: 30 layers of 32 states of 128 x 128 in fp32, and the 3 last rows of q, k and v in bf16.

    SGLang 0.5 gives states 0.9 of what keys and values get; a request takes five places where prefixes are kept.
    """
    one = 30 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    assert [request_bytes(QWEN3_5, size, 2) for size in (1, 2)] == [one, one / 2]

    def engine(on_cpu: bool = False, **args: Any) -> Any:
        args = {"mem_fraction_static": 0.8} | args
        return engine_memory(QWEN3_5, 60e9, 2, "bf16", args, device_memory=80 * GIB, on_cpu=on_cpu)

    made, room = engine(), 0.8 * 80 * GIB - 30e9
    assert made.num_states == int(room * 0.9 / 1.9 // (one / 2)) and made.num_requests == (made.num_states - 1) // 5
    assert made.kv_tokens == int((room - made.num_states * one / 2) // (10 * 2 * 1 * 256 * 2))
    assert made.pool == pytest.approx(room, rel=1e-4)
    assert engine(mamba_full_memory_ratio=0.1).num_states == int(room * 0.1 / 1.1 // (one / 2))
    assert engine(max_mamba_cache_size=40).num_requests == 8
    alone = engine(disable_radix_cache=True, max_running_requests=40)
    assert (alone.num_states, alone.num_requests) == (41, 40)
    on_cpu = engine(on_cpu=True)
    assert (on_cpu.num_states, on_cpu.num_requests) == (769, 256) and on_cpu.pool > 769 * one / 2
    assert engine(on_cpu=True, disable_radix_cache=True, max_running_requests=40).num_states == 769
    assert engine_memory(QWEN3_30B, 60e9, 2, "bf16", {}, device_memory=80 * GIB, on_cpu=False).num_states == 0


def test_states_are_in_the_plan_and_too_few_of_them_are_refused() -> None:
    values = {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2} | EIGHT
    four = {"num_layers": 4, "attention": QWEN3_5.attention[:4], "mlp": QWEN3_5.mlp[:4]}  # plans of 40 take seconds
    shape = QWEN3_5.model_copy(update=four)
    made = plan(shape, 80, **values).memory
    (line,) = (line for line in made.lines() if line.startswith("a device of an engine: "))
    assert "+ states " in line and " of 3.1 MiB, for " in line and line.endswith(" requests at a time")
    in_place = plan(shape, 80, pause_generation_mode="in_place", **values).memory  # without a prefix cache
    assert in_place.engine.num_requests == in_place.engine.num_states - 1 == made.engine.num_states - 1
    passed = PassThrough(sglang={"max_mamba_cache_size": 4})
    starved = plan(shape, 80, passed=passed, **values).memory
    assert starved.fits is False and "the engine has room for 5 states of 0.003" in starved.verdict()


def test_phases_that_alternate_are_not_summed() -> None:
    """Colocated, an engine's 60 GiB and the trainers' memory take turns; kept on the device they do not."""
    turns = plan(QWEN3_30B, 141, **EIGHT, colocate=True).memory
    kept = plan(QWEN3_30B, 141, **EIGHT, colocate=True, offload_train="never", offload_rollout=False).memory
    names = [bar.name for bar in turns.device_bars]
    assert names == ["trainers, stage 0, backward", "trainers, stage 0, log-probs", "stage 0, push", "generation"]
    assert kept.worst.total > turns.worst.total + 50 * GIB
    assert kept.engine.kv_tokens < turns.engine.kv_tokens
    # Every step begins with gradients of zero, which are not kept.
    parts, offloaded = dict(turns.device_bars[0].parts), dict(turns.host_bars[0].parts)["offloaded trainers"]
    assert offloaded == pytest.approx(8 * (parts["weights"] + parts["optimizer"]), abs=8 * 2 * 64 * 2**20)
    assert offloaded % (64 * 2**20) == 0, "blocks of pinned memory"
    assert dict(kept.host_bars[0].parts)["offloaded trainers"] == 0


@pytest.mark.parametrize(
    ("shape", "memory", "sizes", "words", "cure"),
    [
        (QWEN3_30B, 90, (8, 32768), "--recompute-granularity full", {"transformer": FULL}),
        # Supervised training of 8B on one H100: no layout helps, recompute and offload do.
        (QWEN3_8B, 79.6, (1, 8192), "--optimizer-cpu-offload", {"transformer": FULL, "optimizer": OFFLOAD}),
    ],
    ids=["recompute", "offload"],
)
def test_the_least_change_that_fits_is_named_and_fits(
    shape: ModelShape, memory: float, sizes: tuple[int, int], words: str, cure: dict[str, Any]
) -> None:
    num_gpus, num_tokens = sizes
    values = SFT | {"actor_num_gpus_per_node": num_gpus, "max_tokens_per_gpu": num_tokens}
    values |= {"expert_model_parallel_size": 8 if shape.num_experts else 1}
    made = plan(shape, memory, **values)
    assert made.memory.fits is False
    (warning,) = memory_warnings(made)
    assert "DOES NOT FIT" in warning and words in warning and words in str(made.memory.change)
    assert plan(shape, memory, passed=PassThrough(**cure), **values).memory.fits


@pytest.mark.parametrize(
    ("shape", "proposed"),
    [(DENSE, set()), (GPT_OSS, {"model"}), (QWEN3_30B, {"model", "tensor"})],
    ids=["none", "with biases", "others"],
)
def test_experts_are_divided_over_devices_where_they_may_be(shape: ModelShape, proposed: set[str]) -> None:
    """Experts with biases stand whole on a rank: as many as there are may go to others."""
    flags = " ".join(flags for flags, _ in changes(Config.from_flat({"actor_num_gpus_per_node": 8}), shape))
    assert {kind for kind in ("model", "tensor") if f"--expert-{kind}-parallel-size 2" in flags} == proposed


def test_experts_may_be_divided_by_their_own_tensor_parallelism() -> None:
    sizes = {"actor_num_gpus_per_node": 8, "tensor_model_parallel_size": 2}
    config = Config.from_flat({"rollout_batch_size": 8, "num_rollout": 1} | sizes)
    flags = [flags for flags, _ in changes(config, QWEN3_30B)]
    assert "--expert-tensor-parallel-size 2" in flags
    assert not any("--expert-tensor-parallel-size" in flags for flags, _ in changes(config, QWEN3_8B))


def test_an_engine_without_room_for_one_sample_and_where_nothing_fits() -> None:
    hopeless = plan(QWEN3_30B, 20, **SFT, **EIGHT).memory
    assert hopeless.change is None and "take more devices" in hopeless.verdict()
    made = plan(QWEN3_30B, 60, colocate=True, actor_num_nodes=8, **EIGHT)
    assert "KV cache has room for 0 tokens" in made.memory.verdict()
    assert str(made.memory.change).startswith("--rollout-num-gpus-per-engine 2")


def test_our_attention_is_counted_where_samples_have_a_bound() -> None:
    """It keeps less than torch's; without a bound of the prompt, or with dropout, torch's may be what computes."""
    rollout = {"prompt_data": "a.jsonl", "custom_rm_path": "a.b", "num_rollout": 1, "rollout_max_response_len": 100}

    def activations(passed: Any = None, **values: Any) -> float:
        memory = plan(DENSE, 64, "cpu", passed, **rollout | values).memory
        return dict(memory.host_bars[0].parts)["activations"]

    bound = activations(rollout_max_prompt_len=1)  # as many tokens as without the flag
    assert bound == activations(rollout_max_context_len=101) < activations() / 1.05
    dropout = PassThrough(transformer={"attention_dropout": 0.1})
    assert bound < activations(dropout, rollout_max_prompt_len=1) / 1.05
    assert activations(rollout_max_prompt_len=412) < activations(rollout_max_prompt_len=413) / 1.05  # 512, and 513


def test_a_plan_of_hundreds_of_gigabytes_does_not_pass_in_silence_on_a_cpu() -> None:
    """All processes share the node's memory: a 30B model in fp32 takes hundreds of GiB, this machine has 23."""
    made = plan(QWEN3_30B, 23, device="cpu")
    assert made.memory.worst.total > 500 * GIB
    assert made.memory.fits is False and "DOES NOT FIT" in made.memory.verdict()
    small = plan(DENSE, 23, device="cpu", actor_num_gpus_per_node=2, rollout_num_gpus=2)
    assert small.memory.fits and small.memory.worst.total < 12 * GIB and memory_warnings(small) == []
    tensors = push_tensors(DENSE, stage_of_rule([[0, 1, 2, 3]]), "float32")
    push = plan_push(tensors, small.layout, small.num_engines, 512 * 2**20)
    assert small.memory.push == max(push.peak_bytes(rank) for rank in push.sources)


def test_a_critic_and_a_reference_model_have_their_own_share() -> None:
    values = {"advantage_estimator": "ppo", "use_kl_loss": True, "kl_loss_coef": 0.1}
    bar, plain = (dict(plan(DENSE, 23, "cpu", **v).memory.host_bars[0].parts) for v in (values, {}))
    (actor,) = states(DENSE, TrainerLayout(1), FP32)
    (critic,) = states(DENSE.with_value_head(), TrainerLayout(1), FP32)
    assert bar["weights"] == actor.weights + critic.weights
    assert (bar["reference weights"], plain["reference weights"]) == (actor.weights, 0)


def test_short_samples_do_not_fill_a_micro_batch() -> None:
    """16 samples of 33 tokens a step are 528 tokens, however many --max-tokens-per-gpu allows."""
    values = {"rollout_max_response_len": 32, "rollout_batch_size": 16}
    few, many = (dict(plan(DENSE, 23, "cpu", **v).memory.host_bars[0].parts)["activations"] for v in (values, {}))
    assert few < many / 8


def test_memory_of_this_machine_is_what_its_control_group_allows(tmp_path: Path) -> None:
    whole = host_memory(tmp_path)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for text, wanted in (("max\n", whole), ("1048576\n", 1048576)):
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(text)
        assert host_memory(tmp_path) == wanted


def test_cuda_ipc_takes_its_buffers_and_the_largest_tensor_whatever_the_layout() -> None:
    """Each rank sends to the engine on its own GPU, so nothing is gathered by the plan of a broadcast."""
    values = {"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2}
    shared, apart = plan(DENSE, 80, colocate=True, **values), plan(DENSE, 80, rollout_num_gpus=2, **values)
    assert (shared.transport, apart.transport) == ("ipc", "broadcast")
    largest = 2 * max(rule.numel for rule in model_rules(DENSE).values())
    assert shared.memory.push == BUFFERS * max(512 * 2**20, largest) + largest
    assert apart.memory.push != shared.memory.push
    assert "MB by ipc\n" in render_plan(shared, Config.from_flat({"rollout_batch_size": 8}))
    assert "MB by broadcast: " in render_plan(apart, Config.from_flat({"rollout_batch_size": 8}))


def test_offloading_means_the_whole_optimizer_unless_a_fraction_is_given() -> None:
    for fraction, share in ((None, 1.0), (0.5, 0.5), (0.0, 0)):
        given = {} if fraction is None else {"optimizer_offload_fraction": fraction}
        passed = PassThrough(optimizer={"optimizer_cpu_offload": True} | given)
        assert StateOptions.of("bf16", passed.optimizer, {}).host_share == share
        assert PassThrough.model_validate(passed.model_dump()) == passed
    assert StateOptions.of("bf16", {"optimizer_cpu_offload": False}, {}).host_share == 0


# 32 B parameters: 60 GiB in bf16.
LARGE = WIDE | {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64}


def folder(path: Path, raw: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    return str(path)


def report(memory: float, device: Any = "cuda", shape: ModelShape = DENSE, **values: Any) -> MemoryReport:
    return plan(shape, memory, device, **values).memory


def teacher(path: str, **sizes: int) -> dict[str, Any]:
    return {"use_opd": True, "opd_type": "sglang", "opd_teacher_load": path} | sizes


def test_a_teacher_has_devices_of_its_own(tmp_path: Path) -> None:
    path = folder(tmp_path / "teacher", LARGE)
    without = report(80)
    made = report(80, **teacher(path, opd_teacher_num_gpus=2, opd_teacher_num_gpus_per_engine=2))
    ((_, engine),) = made.scorers
    count = shape_from_hf_config(LARGE).num_parameters
    assert engine.weights == count  # of 2 bytes each, on 2 devices
    (bar,) = (bar for bar in made.device_bars if bar.name == "teacher")
    assert dict(bar.parts)["weights"] == count and bar.total < 80 * GIB
    assert made.fits and made.worst == without.worst, "an engine takes what is there"
    assert any(line.startswith("a device of an engine of the teacher: weights ") for line in made.lines())
    processes = [dict(one.host_bars[0].parts)["processes"] for one in (without, made)]
    assert processes[1] - processes[0] == 2 * GPU_PROCESS


def test_a_teacher_that_does_not_fit_is_said_with_its_cure(tmp_path: Path) -> None:
    path = folder(tmp_path / "teacher", LARGE)
    made = report(60, **teacher(path))
    assert made.fits is False
    assert "DOES NOT FIT: the teacher's engine's KV cache has room for 0 tokens" in made.verdict()
    assert "it would with --opd-teacher-num-gpus-per-engine 2 --opd-teacher-num-gpus 2" in made.verdict()
    assert report(60, **teacher(path, opd_teacher_num_gpus=2, opd_teacher_num_gpus_per_engine=2)).fits
    # Devices that are there are not asked for again.
    change = report(60, **teacher(path, opd_teacher_num_gpus=4)).change
    assert str(change).startswith("--opd-teacher-num-gpus-per-engine 2 (")
    # SGLang fields that a user sets are the engine's.
    assert report(80, **teacher(path)).fits
    lean = report(80, **teacher(path), opd_teacher_server_args={"mem_fraction_static": 0.7})
    assert "of 0.70 of the device" in lean.verdict()


def test_both_engines_and_teacher_are_cured(tmp_path: Path) -> None:
    path = folder(tmp_path / "teacher", LARGE)
    trained = {"actor_num_nodes": 8, "actor_num_gpus_per_node": 8, "tensor_model_parallel_size": 8}
    made = report(60, shape=shape_from_hf_config(LARGE), rollout_num_gpus=8, **trained, **teacher(path))
    change = "--rollout-num-gpus-per-engine 2 --opd-teacher-num-gpus-per-engine 2 --opd-teacher-num-gpus 2"
    assert str(made.change).startswith(change), made.verdict()


def test_on_a_cpu_it_is_in_its_nodes_memory(tmp_path: Path) -> None:
    values = ({}, teacher(folder(tmp_path / "teacher", SMALL)))
    without, made = (dict(report(23, "cpu", **value).host_bars[0].parts) for value in values)
    assert made["reward model's and teacher's weights"] == 4 * DENSE.num_parameters
    assert made["KV caches"] == 2 * without["KV caches"] > 0
    assert made["processes"] - without["processes"] == ENGINE_PROCESS
    large = report(23, "cpu", **teacher(folder(tmp_path / "large", LARGE)))
    assert large.fits is False and "DOES NOT FIT" in large.verdict()


def test_a_reward_model_has_a_score_in_place_of_the_output_layer(tmp_path: Path) -> None:
    rm = folder(tmp_path / "rm", SMALL | {"architectures": ["Qwen3ForSequenceClassification"]})
    made = report(23, "cpu", rm_type="reward_model", rm_model=rm)
    ((_, engine),) = made.scorers
    assert engine.weights == 4 * (DENSE.num_parameters - 512 * 64 + 64)
    assert any(line.startswith("a device of an engine of the reward model: ") for line in made.lines())


def test_an_fp8_teacher_counts_as_fp8(tmp_path: Path) -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    folders = [folder(tmp_path / name, LARGE | raw) for name, raw in (("bf16", {}), ("fp8", fp8))]
    (_, plain), (_, half) = (report(80, **teacher(path)).scorers[0] for path in folders)
    assert 0.5 < half.weights / plain.weights < 0.56  # the embeddings stay in bf16


@pytest.mark.parametrize(("raw", "reason"), [({"model_type": "gemma2"}, "gemma2"), (None, "config.json is missing")])
def test_a_model_that_only_sglang_knows(raw: dict[str, Any] | None, reason: str, tmp_path: Path) -> None:
    path = str(tmp_path / "elsewhere") if raw is None else folder(tmp_path / "rm", raw)
    made = report(80, rm_type="reward_model", rm_model=path)
    assert made.fits and made.scorers[0][1] is None
    (line,) = (line for line in made.lines() if line.startswith("the reward model: not estimated ("))
    assert reason in line and f"--rm-model {path}" in line


def test_gradients_that_are_added_in_place_leave_placeholders() -> None:
    """As Transformer Engine adds them; local layers, which cannot, keep the largest gradient on its way."""

    def sizes(options: TrainingOptions, **fields: Any) -> Any:
        return trainer_memory(DENSE, TrainerLayout(1), replace(options, tokens=64), BF16, fields)

    local, fusion = replace(FUSED, impl="local"), {"gradient_accumulation_fusion": True}
    assert sizes(FUSED) != sizes(FUSED, **fusion) and sizes(local) == sizes(local, **fusion)
