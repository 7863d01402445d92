"""The plan: where engines and trainers go, how many steps there are, and what memory they take."""

import re
from contextlib import nullcontext
from typing import Any

import pytest

from fusionrl.config.config import Config, PassThrough
from fusionrl.models.kinds import Full
from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.plan import render
from fusionrl.plan.placement import check_fused_layers, place_engines, place_one_by_one
from fusionrl.plan.plan import Plan, make_plan, plan_errors
from fusionrl.plan.render import open_file_warnings, render_plan, samples_in_flight
from fusionrl.plan.trainer_plan import auxiliary_config, layer_impl
from tests.models.test_families import shape_of
from tests.plan.shapes import SMALL

SHAPE = shape_from_hf_config(SMALL)
BASE: dict[str, Any] = {"rollout_batch_size": 8, "num_rollout": 3}


def plan(
    device: Any = "cpu",
    num_prompts: int = 100,
    num_cores: int = 8,
    passed: Any = None,
    shape: ModelShape = SHAPE,
    **values: Any,
) -> Plan:
    config = Config.from_flat({k: v for k, v in (BASE | values).items() if v is not None}, passed)
    made = make_plan(config, shape, device=device, num_prompts=num_prompts, num_cores=num_cores)
    text = render_plan(made, config)
    assert text.count("\n") >= 5 and not re.search(r"\b1 \w+s\b", text), text
    return made


def text_of(made: Plan, **values: Any) -> str:
    return render_plan(made, Config.from_flat(BASE | values))


def fields(made: Plan, names: str) -> tuple[Any, ...]:
    return tuple(getattr(made, name) for name in names.split())


PLACES = "trainer_bundles engine_bundles num_bundles is_colocated transport backend precision rollout_dtype"


def test_apart_and_colocated() -> None:
    made = plan(actor_num_gpus_per_node=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    assert fields(made, PLACES) == ((0, 1), ((2, 3), (4, 5)), 6, False, "broadcast", "gloo", "fp32", "fp32")
    assert "turns " not in text_of(made)
    no_cache = "; no prefix cache, for --pause-generation-mode in_place"
    assert no_cache not in text_of(made) and no_cache in text_of(made, pause_generation_mode="in_place")
    made = plan("cuda", actor_num_gpus_per_node=4, rollout_num_gpus_per_engine=2, colocate=True)
    assert fields(made, PLACES) == ((0, 1, 2, 3), ((0, 1), (2, 3)), 4, True, "ipc", "nccl", "bf16", "bf16")
    assert "turns      engines start alone, then trainers; " in text_of(made)
    assert fields(plan(precision="bf16"), "precision rollout_dtype") == ("bf16", "bf16")
    assert "; attention torch_batched" in text_of(plan()), "the default on a CPU"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"pipeline": "async"}, "loss       decoupled: .*the default of --pipeline async, off by --no-use-tis"),
        ({"pipeline": "stream", "use_rollout_logprobs": True}, "loss       the ratio is taken to the engine's log-p"),
        ({"pipeline": "async", "use_tis": False}, "loss       tokens of older weights are taken for tokens of the ne"),
        ({"pipeline": "on-policy"}, None),
    ],
)
def test_the_loss_of_older_tokens_is_told(values: dict[str, Any], told: str | None) -> None:
    given = {"n_samples_per_prompt": 2, **values}
    text = text_of(plan(**given), **given)
    assert re.search(told, text) if told else "\nloss " not in text
    assert (plan(**given).trainer_plan().knobs is None) == (told is None)


DRAFTS = {"engine_group": ["g:num_gpus=1,speculative-algorithm=EAGLE"]}
NATIVE = {"engine_group": ["g:num_gpus=1,attention-backend=torch_native"]}
PAIR = {"engine_group": ["first:num_gpus=1,role=prefill", "then:num_gpus=1,role=decode"], "rollout_num_gpus": 2}
FA3 = {"engine_group": ["a:num_gpus=1,attention-backend=fa3"]}
TORCH_BATCHED = {"engine_group": ["a:num_gpus=1,attention-backend=torch_batched"]}
NGRAM, FUSED = {"speculative_algorithm": "NGRAM"}, {"transformer_impl": "transformer_engine"}
NATIVE_FLAG = {"attention_backend": "torch_native"}
REPLAY = {"use_rollout_routing_replay": True}


@pytest.mark.parametrize(
    ("device", "values", "sglang", "message"),
    [
        ("cpu", {}, {"speculative_algorithm": "EAGLE"}, "--sglang-speculative-algorithm EAGLE: .* use NGRAM"),
        ("cpu", {}, NGRAM | NATIVE_FLAG, "-backend torch_native: on a CPU only torch_batched"),
        ("cpu", DRAFTS, {}, "--engine-group g: speculative-algorithm EAGLE: .* use NGRAM"),
        ("cpu", NATIVE, NGRAM, "--engine-group g: .* torch_native: on a CPU only"),
        ("cpu", {"engine_group": ["g:num_gpus=1,speculative-algorithm=NGRAM"]}, {}, None),
        ("cpu", {}, NGRAM, None),
        ("cuda", {}, {"speculative_algorithm": "EAGLE"}, None),
        ("cpu", REPLAY, {}, "--use-rollout-routing-replay: SGLang records which experts it chose on a GPU"),
        ("cuda", REPLAY, {}, None),
        ("cpu", REPLAY | {"custom_generate_function_path": "mine.py:generate"}, {}, None),
        ("cuda", REPLAY | PAIR, {}, "--use-rollout-routing-replay with --engine-group role=prefill"),
        ("cpu", PAIR, {}, "--engine-group first: role=prefill on a CPU"),
        ("cuda", PAIR, {}, None),
        ("cuda", {"precision": "fp32"} | FUSED, {}, "--transformer-impl transformer_engine with --precision fp32"),
        ("cuda", {"precision": "fp32"}, {"attention_backend": "fa3"}, "--sglang-attention-backend fa3: .* in fp32"),
        ("cuda", {"precision": "fp32"}, {"decode_attention_backend": "flashinfer"}, "--sglang-decode-attention-back"),
        ("cuda", {"precision": "fp32"}, {"attention_backend": "triton"}, None),
        ("cuda", {"precision": "fp32", "rollout_dtype": "bf16"}, {"attention_backend": "fa3"}, None),
        ("cuda", FUSED, {"attention_backend": "fa3"}, None),
        ("cuda", {}, {"attention_backend": "torch_batched"}, "torch_batched: it is for engines on a CPU"),
        ("cuda", FA3 | {"precision": "fp32"}, {}, "--engine-group a: attention-backend fa3: the engines are in fp32"),
        ("cuda", FA3, {}, None),
        ("cuda", TORCH_BATCHED, {}, "--engine-group a: attention-backend torch_batched: it is for engines on a CPU"),
    ],
)
def test_what_a_device_refuses(device: str, values: dict[str, Any], sglang: Any, message: str | None) -> None:
    passed = PassThrough(sglang=sglang)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        plan(device, passed=passed, **{"rollout_num_gpus": 1} | values)


@pytest.mark.parametrize(
    ("family", "shares"), [("gemma3_text", True), ("gpt_oss", True), ("deepseek_v3", False), ("qwen3_5_text", False)]
)
def test_prompts_are_shared_where_every_layer_can(family: str, shares: bool) -> None:
    """--share-prompts is on; a delta net would take a sibling's answer into the state of the next."""
    balance = plan(shape=shape_of(family)).balance
    assert balance is not None and balance.share_prompts is shares


def test_delta_nets_refuse_drafts_on_a_cpu() -> None:
    passed, shape = PassThrough(sglang=NGRAM), shape_of("qwen3_5_text")
    with pytest.raises(ValueError, match="-algorithm NGRAM: on a CPU delta nets would need a state for each token"):
        plan("cpu", passed=passed, shape=shape, rollout_num_gpus=1)
    plan("cuda", passed=passed, shape=shape, rollout_num_gpus=1)


def test_the_optimizer_has_no_gpu_to_leave_on_a_cpu() -> None:
    passed = PassThrough(optimizer={"optimizer_cpu_offload": True})
    with pytest.raises(ValueError, match="--optimizer-cpu-offload: there is no GPU memory to save"):
        plan("cpu", passed=passed)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"colocate": True, "update_weight_transport": "broadcast"}, "NCCL takes no two ranks on one GPU"),
        ({"colocate": True, "rollout_num_gpus": 2}, "only 1 devices have a trainer to share"),
        ({"rollout_num_gpus": 1, "update_weight_transport": "ipc"}, "these have none; use broadcast"),
    ],
)
def test_placements_that_gpus_refuse(values: dict[str, Any], told: str) -> None:
    """Whatever --device says: with auto a GPU is found, and the run would end at its first push."""
    for device in ("auto", "cuda"):
        flags = BASE | {"device": device} | values
        assert [error for error in plan_errors(Config.from_flat(flags), 4, SHAPE, "cuda") if told in error]
        with pytest.raises(ValueError, match=told):
            make_plan(Config.from_flat(flags), SHAPE, device="cuda", num_prompts=4)
    plan("cpu", **values)
    assert plan_errors(Config.from_flat(BASE | values), 4, SHAPE) == []


SCORERS = {"rm_model": "RM", "use_opd": True, "opd_teacher_load": "TEACHER"}


def scorers(made: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {scorer.role: scorer.bundles for scorer in made.scorers}


def test_engines_that_only_read_come_after_the_policy_s() -> None:
    made = plan(**SCORERS, actor_num_gpus_per_node=2, rollout_num_gpus=2)
    assert (made.engine_bundles, made.num_bundles) == (((2,), (3,)), 6)
    assert scorers(made) == {"reward-model": ((4,),), "teacher": ((5,),)}
    text = text_of(made, **SCORERS)
    assert "rm         1 x TP 1 of RM: [4]\n" in text and "teacher    1 x TP 1 of TEACHER: [5]\n" in text
    colocated = plan("cuda", **SCORERS, actor_num_gpus_per_node=4, colocate=True, rm_num_gpus=2)
    assert scorers(colocated) == {"reward-model": ((4,), (5,)), "teacher": ((6,),)}
    assert colocated.is_colocated and colocated.num_bundles == 7


@pytest.mark.parametrize(
    ("values", "roles"),
    [
        ({"mode": "eval"}, ["reward-model"]),
        ({"mode": "reject-sampling"}, ["reward-model"]),
        ({"debug_rollout_only": True, "use_opd": True}, ["reward-model", "teacher"]),
        ({"debug_train_only": True, "use_opd": True}, []),
        ({"mode": "sft"}, []),
    ],
)
def test_modes_that_have_them(values: dict[str, Any], roles: list[str]) -> None:
    assert list(scorers(plan(**SCORERS | {"use_opd": False} | values))) == roles


def test_no_engine_that_reads_spans_two_nodes() -> None:
    """Three nodes of 4: trainers on the first, an engine and one of the reward model's on the second, …"""
    values = {**SCORERS, "num_gpus_per_node": 4, "actor_num_gpus_per_node": 4, "rm_num_gpus": 4}
    made = plan("cuda", **values, rm_num_gpus_per_engine=2, opd_teacher_num_gpus=4, opd_teacher_num_gpus_per_engine=4)
    assert made.engine_bundles == ((4,),)
    assert scorers(made) == {"reward-model": ((5, 6), (8, 9)), "teacher": ((12, 13, 14, 15),)}
    assert made.num_bundles == 16
    assert "idle [7, 10, 11] so that no engine spans more nodes than it needs" in text_of(made, **SCORERS)
    evaluates = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2, "eval_num_gpus": 2, "num_gpus_per_node": 4}
    assert fields(plan("cuda", **evaluates), "engine_bundles eval_bundles") == (((1, 2),), ((4, 5),))


def test_a_process_reward_model_s_trainers() -> None:
    prime = {"advantage_estimator": "prime", "actor_num_gpus_per_node": 2, "context_parallel_size": 2}
    shared = plan(**prime).auxiliary
    assert shared is not None and shared.role == "prm" and shared.bundles == (0, 1) and shared.layout.cp == 2
    own = {**prime, "prm_num_gpus": 2, "prm_tensor_model_parallel_size": 2, "prm_context_parallel_size": 1}
    made = plan(**own)
    assert made.auxiliary is not None and made.auxiliary.bundles == (3, 4) and not made.shares_with_auxiliary
    text = text_of(made, **own)
    assert "prm        2 ranks = TP 2 x CP 1 x PP 1 x DP 1 (EP 1) on devices [3, 4]\n" in text and "idle" not in text
    assert plan(advantage_estimator="prime", mode="sft").auxiliary is None
    provided = Config.from_flat({"custom_model_provider_path": "mine.py:model", "prm_load": "elsewhere"})
    assert auxiliary_config(provided, "prm").model.custom_model_provider_path is None, "it builds the policy alone"
    assert auxiliary_config(provided, "prm").model.hf_checkpoint == "elsewhere"
    (error,) = plan_errors(Config.from_flat(BASE | own | {"prm_num_gpus": 3}), num_prompts=4, shape=SHAPE)
    assert error.startswith("prm (--prm-num-gpus, --prm-…-parallel-size): ")


def test_engines_that_evaluate_alone_come_last() -> None:
    values = {"eval_num_gpus": 2, "rm_model": "RM", "actor_num_gpus_per_node": 2, "pipeline": "async"}
    made = plan(**values)
    assert (made.engine_bundles, scorers(made)) == (((2,),), {"reward-model": ((3,),)})
    assert (made.eval_bundles, made.num_engines, made.num_bundles) == (((4,), (5,)), 1, 6)
    assert made.all_engine_bundles == ((2,), (4,), (5,))
    text = text_of(made, **values)
    assert "placement  6 devices" in text
    assert "evaluation 2 x TP 1, while training continues: engine 1 on [4], engine 2 on [5]\n" in text
    without = plan(**values | {"eval_num_gpus": 0})
    assert made.memory is not None and without.memory is not None
    assert made.memory.host_bars[0].total > without.memory.host_bars[0].total


@pytest.mark.parametrize(
    ("values", "flags"),
    [({"eval_num_gpus": 3, "rollout_num_gpus": 2}, ("eval", "rollout")), ({**SCORERS, "rm_num_gpus": 3}, ("rm", "rm"))],
)
def test_devices_of_theirs_that_do_not_divide(values: dict[str, Any], flags: tuple[str, str]) -> None:
    values = BASE | values | {f"{flags[1]}_num_gpus_per_engine": 2}
    (error,) = plan_errors(Config.from_flat(values), num_prompts=4)
    wanted = "--{}-num-gpus 3 is not a multiple of --{}-num-gpus-per-engine 2; sizes that divide 3: 1 and 3"
    assert error == wanted.format(*flags)


@pytest.mark.parametrize(
    ("values", "bundles", "engines", "has_layout", "transport"),
    [
        ({"mode": "sft", "actor_num_gpus_per_node": 2}, 2, 0, True, None),
        ({"mode": "eval", "rollout_num_gpus": 2}, 2, 2, False, None),
        ({"mode": "reject-sampling", "no_trainer": True}, 1, 1, False, None),
        ({"mode": "reject-sampling"}, 2, 1, True, "broadcast"),
        ({"debug_rollout_only": True, "colocate": True, "actor_num_gpus_per_node": 4}, 1, 1, False, None),
        ({"debug_train_only": True}, 1, 0, True, None),
    ],
)
def test_modes_take_only_the_devices_they_use(
    values: dict[str, Any], bundles: int, engines: int, has_layout: bool, transport: str | None
) -> None:
    made = plan(**values)
    assert fields(made, "num_bundles num_engines transport") == (bundles, engines, transport)
    assert (made.layout is not None) == has_layout
    assert any(bar.name == "training" for bar in made.memory.host_bars) is has_layout


def test_number_of_rollouts() -> None:
    assert plan(num_rollout=None, num_epoch=3, num_prompts=20).num_rollout == 7  # 60 prompts, 8 a rollout
    assert plan(num_rollout=5, num_epoch=3).num_rollout == 5
    assert plan(num_rollout=0).num_rollout == 0
    assert plan(mode="sft", n_samples_per_prompt=4).batch.num_samples == 8, "each conversation is trained once"
    with pytest.raises(ValueError, match="--num-epoch 1 x 7 prompts"):
        plan(num_rollout=None, num_epoch=1, num_prompts=7)


def test_cores_are_shared_out_over_the_ranks_of_a_node() -> None:
    assert plan(num_cores=8, actor_num_gpus_per_node=2).train_num_threads == 4
    assert plan(num_cores=8, actor_num_nodes=2, actor_num_gpus_per_node=2).train_num_threads == 4
    assert plan(num_cores=2, actor_num_gpus_per_node=4).train_num_threads == 1
    assert plan(num_cores=8, train_num_threads=3).train_num_threads == 3


def test_all_sizes_that_do_not_fit_are_found_at_once() -> None:
    values = {"actor_num_gpus_per_node": 3, "tensor_model_parallel_size": 2, "rollout_num_gpus": 3}
    values |= {"rollout_num_gpus_per_engine": 2, "rollout_batch_size": 8, "global_batch_size": 3, "num_epoch": 1}
    found = plan_errors(Config.from_flat(values), num_prompts=4)
    parts = ("tp 2", "--rollout-num-gpus 3", "--global-batch-size 3", "--num-epoch 1")
    assert len(found) == 4 and all(any(part in error for error in found) for part in parts)
    with pytest.raises(ValueError, match="tp 2"):
        plan(num_rollout=None, **values)


def test_trainers_and_hooks_get_the_plans_answers() -> None:
    made = plan(num_rollout=None, num_epoch=2, num_prompts=100, n_samples_per_prompt=4, global_batch_size=16)
    own = made.trainer_plan()
    assert (own.layout, own.precision, own.num_threads, own.num_steps) == (made.layout, "fp32", 8, 25 * 2)
    answers = {
        "num_rollout": 25,
        "num_steps_per_rollout": 2,
        "lr_decay_iters": 50,
        "device": "cpu",
        "precision": "fp32",
    }
    assert own.answers.items() >= answers.items()
    critic = plan(advantage_estimator="ppo", critic_num_gpus=2).trainer_plan("critic")
    assert critic.layout.world_size == 2


def test_groups_of_engines_have_their_own_sizes_flags_and_numbers() -> None:
    groups = ["wide:num_gpus=4,per_engine=2,max-running-requests=8", "small:num_gpus=1", "tests:num_gpus=2,role=eval"]
    values = {"engine_group": groups, "rollout_num_gpus": 5, "eval_num_gpus": 2}
    made = plan(**values)
    assert made.engine_bundles == ((1, 2), (3, 4), (5,)) and made.eval_bundles == ((6,), (7,))
    assert fields(made, "num_engines engine_size num_bundles") == (3, 1, 8)
    numbered = [made.group_of(engine) for engine in range(5)]
    assert [group.name for group in numbered if group] == ["wide", "wide", "small", "tests", "tests"]
    text = text_of(made, **values)
    assert "engines    3 in groups: engine 0 on [1, 2], engine 1 on [3, 4], engine 2 on [5]" in text
    assert "           wide: 2 x TP 2, generate, --max-running-requests 8\n" in text
    assert made.answers["rollout_num_engines"] == 3
    assert plan().group_of(0) is None


def test_devices_that_contradict_the_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="--rollout-num-gpus 6: the groups of --engine-group have 4 devices"):
        plan(engine_group=["a:num_gpus=4,per_engine=2"], rollout_num_gpus=6)
    with pytest.raises(ValueError, match="--eval-num-gpus 1: --engine-group a has 2 devices"):
        plan(engine_group=["a:num_gpus=2,role=eval"], eval_num_gpus=1)


def test_engines_leave_devices_idle_before_they_span_nodes() -> None:
    """One that fits on a node spans none; a larger one takes whole nodes."""
    assert place_engines("--n", "--size", 6, 3, 2, 4) == ((4, 5, 6), (8, 9, 10))
    assert place_engines("--n", "--size", 16, 8, 2, 4) == (tuple(range(4, 12)), tuple(range(12, 20)))
    assert place_one_by_one([8], 0, 4) == (tuple(range(8)),), "colocated it has the trainers' nodes"
    assert place_one_by_one([1, 2, 2], 4, 4, may_skip=True) == ((4,), (5, 6), (8, 9))
    assert place_one_by_one([1, 2, 2], 4, 4) == ((4,), (5, 6), (7, 8))
    with pytest.raises(ValueError, match=r"--size 6: .* whole ones, of --num-gpus-per-node 4 devices; take 4 or 8"):
        place_one_by_one([6], 0, 4, "--size")


@pytest.mark.parametrize(
    ("wanted", "device", "has_fused_layers", "precision", "impl"),
    [
        ("auto", "cpu", True, "bf16", "local"),
        ("auto", "cuda", True, "bf16", "transformer_engine"),
        ("auto", "cuda", True, "fp32", "local"),  # Transformer Engine has no packed attention in it
        ("auto", "cuda", False, "bf16", "local"),
        ("local", "cuda", True, "bf16", "local"),
        ("transformer_engine", "cuda", False, "bf16", "transformer_engine"),
    ],
)
def test_layers(wanted: str, device: str, has_fused_layers: bool, precision: str, impl: str) -> None:
    assert layer_impl(wanted, device, has_fused_layers, precision) == impl


def crowded(pipeline: str = "async", **values: Any) -> tuple[Config, Plan]:
    given = {"pipeline": pipeline, "rollout_batch_size": 128, "n_samples_per_prompt": 16, "num_rollout": 3}
    config = Config.from_flat(given | {"rollout_num_gpus": 2} | values)
    return config, make_plan(config, SHAPE, device="cpu", num_prompts=1000, num_cores=8)


@pytest.mark.parametrize(
    ("pipeline", "values", "samples"),
    [
        ("on-policy", {"sglang_server_concurrency": 4096}, 2048),
        ("on-policy", {}, 1024),  # as many as two engines take
        ("on-policy", {"sglang_server_concurrency": 4096, "over_sampling_batch_size": 192}, 3072),
        ("async", {"admission_lead": 1.0, "sglang_server_concurrency": 4096}, 4096),  # a version's own, and the lead
        ("async", {"admission_lead": 1.0, "max_samples_in_flight": 100}, 100),
        ("stream", {"update_weights_interval": 3, "sglang_server_concurrency": 4096}, 6144),
    ],
)
def test_samples_in_flight(pipeline: str, values: dict[str, Any], samples: int) -> None:
    assert samples_in_flight(*crowded(pipeline, **values)) == samples


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"admission_lead": 1.0, "sglang_server_concurrency": 4096}
    monkeypatch.setattr(render, "most_open_files", lambda: 8392)
    assert open_file_warnings(*crowded(**many)) == []  # just enough
    monkeypatch.setattr(render, "most_open_files", lambda: 8391)
    (text,) = open_file_warnings(*crowded(**many))
    assert "4096 samples may be in flight" in text and "8391, enough for 4095" in text
    assert "(ulimit -Hn) to 8392" in text and "--sglang-server-concurrency 2047" in text
    lowered = many | {"sglang_server_concurrency": 2047}
    assert open_file_warnings(*crowded(**lowered)) == []
    assert open_file_warnings(*crowded("on-policy", mode="sft", prompt_data="x.jsonl")) == []


def test_a_transformer_engine_that_is_too_old_for_sinks_is_refused() -> None:
    """Not where the layers are the local ones."""
    plain = shape_from_hf_config(SMALL)
    shape = plain.model_copy(update={"attention": (Full(sinks=True),) * plain.num_layers})
    with pytest.raises(ValueError, match=r"Transformer Engine 2.7.1 has no attention of the kind full .* version 2.8"):
        check_fused_layers(Config.from_flat({}), shape, "cuda", "bf16", "2.7.1")
    for checked, device, precision, version in (
        (shape, "cuda", "bf16", "2.20.2"),
        (shape, "cuda", "bf16", None),
        (shape, "cuda", "fp32", "2.7.1"),
        (shape, "cpu", "fp32", "2.7.1"),
        (plain, "cuda", "bf16", "1.13.0"),
    ):
        check_fused_layers(Config.from_flat({}), checked, device, precision, version)
