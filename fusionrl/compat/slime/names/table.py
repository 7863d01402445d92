"""Every slime name that fusionrl knows: module path → name → where it lives here, or why it does not.

Pure. No name of a module in `ABSENT_MODULES` exists; an error reports any other name as unknown. Read against slime's
public revision of August 2026; docs/guides/from-slime.md follows it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Here:
    """A name that exists here.

    target   `module:name`; a module alone means the module itself
    differs  how its behaviour differs from slime's; empty: it is the same to a caller
    """

    target: str
    differs: str = ""


@dataclass(frozen=True)
class Absent:
    """A name, or a whole module, that does not exist here.

    why      the reason
    instead  what to use or write in its place
    """

    why: str
    instead: str


Entry = Here | Absent
Names = dict[str, Entry]


def all_from(module: str, names: str, differs: str = "") -> Names:
    """Return entries of names, with spaces between, that have the same names in `module`."""
    return {name: Here(f"{module}:{name}", differs) for name in names.split()}


def none_of(why: str, instead: str, names: str) -> Names:
    """Return entries of names, with spaces between, that are absent for one reason."""
    return dict.fromkeys(names.split(), Absent(why, instead))


_ROLLOUT = "fusionrl.rollout.sglang_rollout"
_STATE = "fusionrl.rollout.generate_state"
_API = "fusionrl.compat.slime.api"
_REWARDS = "fusionrl.rewards"
_OWN_GRADER = "the graders here normalise answers in one function"

# Reason and cure, for `none_of`.
_PROXY = (
    "the session proxy answers both protocols, and records tokens, masks and log-probs",
    "take base_url and api_key of the agent's function (--agent-path), or of fusionrl.plugin_api.open_session in a"
    " generate function (docs/guides/agents.md)",
)
_RECORD = (
    "the session proxy keeps the turns of a conversation, and begins a segment where its history is rewritten",
    "return session.samples(reward) of fusionrl.plugin_api.open_session (docs/guides/agents.md)",
)
_HARNESS = (
    "no program of an agent is installed or started here",
    "start it in the agent's function with OPENAI_BASE_URL or ANTHROPIC_BASE_URL in its environment (--agent-path,"
    " docs/guides/agents.md)",
)

_TYPES: Names = {
    "Sample": Here(
        "fusionrl.data.sample:Sample",
        "weight_versions has one entry a token; teacher_log_probs may be an array; images are not trained on yet",
    ),
    "RolloutBatch": Here("builtins:dict"),
    **all_from(f"{_API}.datasets", "MultimodalType MultimodalTypes"),
    **none_of("a weight push is planned in another form", "see fusionrl.plan.push", "ParamInfo"),
}
_SGLANG_ROLLOUT: Names = {
    **all_from(_ROLLOUT, "generate_and_rm generate_rollout abort"),
    "generate": Here(f"{_ROLLOUT}:generate", "a status other than pending or aborted is not an error"),
    "generate_and_rm_group": Here(
        f"{_ROLLOUT}:generate_and_rm_group", "sets no session ids: requests are routed by prefix and load"
    ),
    "GenerateState": Here(
        f"{_STATE}:GenerateState",
        "one object for each rollout's args, not one for a process; dp_rank is always 0; no processor",
    ),
    **all_from(_STATE, "get_rollout_num_engines"),
    **all_from(f"{_API}.rollouts", "get_model_url eval_rollout generate_rollout_async"),
    "EVAL_PROMPT_DATASET": Absent("evaluation sets are kept by the Buffer", "read them from args.eval_datasets"),
    "eval_rollout_single_dataset": Absent("all sets are evaluated in one call", "use eval_rollout"),
    # Names that slime's module imports, and users import from there.
    **all_from("fusionrl.data.sample", "Sample"),
    **all_from("fusionrl.rollout.types", "RolloutFnTrainOutput RolloutFnEvalOutput"),
    **all_from(f"{_API}.misc", "load_function"),
    **all_from(f"{_API}.datasets", "load_tokenizer"),
    **all_from("fusionrl.rollout.event_loop", "run"),
    **all_from("fusionrl.rollout.engine_post", "post"),
    **all_from(f"{_API}.http", "get"),
    **all_from(f"{_REWARDS}.dispatch", "async_rm batched_async_rm"),
}
_RM_HUB: Names = {
    "async_rm": Here(
        f"{_REWARDS}.dispatch:async_rm",
        "the reward runs in a process of its own; one that hangs costs the sample alone (--reward-timeout-s)",
    ),
    "batched_async_rm": Here(f"{_REWARDS}.dispatch:batched_async_rm", "as async_rm"),
    **all_from(f"{_REWARDS}.remote", "remote_rm"),
    **all_from(f"{_REWARDS}.deepscaler", "get_deepscaler_rule_based_reward"),
    **all_from(f"{_API}.rewards", "f1_score"),
    **all_from(f"{_REWARDS}.gpqa", "compute_gpqa_reward"),
    "compute_score_dapo": Here(f"{_REWARDS}.math_dapo_utils:compute_score"),
    "extract_boxed_answer": Here(f"{_REWARDS}.math_utils:extract_answer"),
    "grade_answer_verl": Here(f"{_REWARDS}.math_utils:grade_answer_verl"),
}
_MATH_UTILS: Names = {
    "extract_answer": Here(f"{_REWARDS}.math_utils:extract_answer"),
    "extract_boxed_answer": Here(f"{_REWARDS}.math_utils:extract_answer", "None, and no error, without a box"),
    "grade_answer_verl": Here(
        f"{_REWARDS}.math_utils:grade_answer_verl", "expressions are compared by math-verify, not by sympy alone"
    ),
    "grade_answer_sympy": Here(f"{_API}.rewards:grade_answer_sympy", "by math-verify"),
    "grade_answer_mathd": Here(f"{_API}.rewards:grade_answer_mathd", "with the normalisation of grade_answer_verl"),
    "mathd_normalize_answer": Here(f"{_REWARDS}.math_utils:normalize_answer", "one normalisation for all graders"),
    **all_from(f"{_API}.rewards", "last_boxed_only_string remove_boxed"),
    **none_of(
        _OWN_GRADER,
        "use grade_answer_verl",
        "BAD_SUBSTRINGS BAD_REGEXES TUPLE_CHARS count_unknown_letters_in_expr should_allow_eval"
        " are_equal_under_sympy split_tuple",
    ),
}
_MATH_DAPO: Names = {
    "compute_score": Here(f"{_REWARDS}.math_dapo_utils:compute_score", "`pred` is None where no answer is found"),
    "normalize_final_answer": Here(f"{_REWARDS}.math_dapo_utils:normalize_final_answer"),
    **all_from(f"{_API}.rewards", "last_boxed_only_string remove_boxed"),
    **none_of(
        _OWN_GRADER,
        "use compute_score",
        "timeout SUBSTITUTIONS REMOVED_EXPRESSIONS is_correct_minerva is_correct_strict_box verify",
    ),
}
_HTTP: Names = {
    "post": Here("fusionrl.rollout.engine_post:post", "an error of the kind 4xx is not tried again"),
    "get_rollout_num_engines": Here(f"{_STATE}:get_rollout_num_engines"),
    **all_from(
        f"{_API}.http",
        "get init_http_client is_port_available find_available_port get_host_info terminate_process SLIME_HOST_IP_ENV",
    ),
    "run_router": Absent("the run starts its router itself", "its address is args.sglang_router_ip and _port"),
}
_MISC: Names = {
    "load_function": Here(f"{_API}.misc:load_function", "takes path/to/file.py:function, too"),
    **all_from(
        f"{_API}.misc",
        "SingletonMeta Box decode_int32_meta_array exec_command get_current_node_ip group_by"
        " should_run_periodic_action",
    ),
    "get_free_port": Here(f"{_API}.http:get_free_port"),
    "chunk_named_params_by_size": Absent("a weight push is planned in another form", "see fusionrl.plan.push"),
}
_TRACE_NAMES: Names = {
    **all_from(
        f"{_API}.metrics",
        "TraceSpanContext trace_span trace_function trace_event",
        "accepted; nothing is recorded",
    ),
    **all_from(f"{_API}.metrics", "build_sglang_meta_trace_attrs"),
    **none_of(
        "no traces of requests are recorded here",
        "remove the call",
        "TraceHandle bind_trace bind_trace_carrier export_trace import_trace trace_next_attempt"
        " TRACE_VERSION TRACE_CHILDREN_KEY SGLANG_TRACE_META_KEYS SGLANG_PD_PREFILL_SEGMENTS"
        " SGLANG_PD_DECODE_SEGMENTS SGLANG_PD_SUMMARY_KEYS",
    ),
}
_CP: Names = {
    **all_from(
        f"{_API}.losses",
        "all_gather_with_cp slice_with_cp slice_log_prob_with_cp get_sum_of_sample_mean",
        "functions get whole responses on every rank: nothing is left to do",
    ),
    **none_of(
        "sequences are cut in another way here",
        "functions get whole responses on every rank, also under context parallelism; leave it out",
        "get_logits_and_tokens_offset_with_cp prepare_routed_experts_for_routing_replay",
    ),
}
_LOSS: Names = {
    "get_log_probs_and_entropy": Here("fusionrl.plugin_api:get_log_probs_and_entropy"),
    **none_of(
        "losses take other inputs here",
        "give yours by --custom-loss-function-path or --custom-policy-loss-path (docs/reference/hooks.md)",
        "get_responses get_values compute_advantages_and_returns policy_loss_function loss_function"
        " value_loss_function sft_loss_function apply_opd_kl_to_advantages",
    ),
    **none_of("it is a flag here", "use --use-tis with --tis-mode", "vanilla_tis_function icepop_function"),
    **none_of(
        "log-probs are not captured between steps",
        "use --custom-advantage-function-path, which gets them",
        "enable_log_prob_capture drain_captured_log_probs ROLLOUT_TOP_P_TOKEN_KEYS get_rollout_top_p_logprob_kwargs",
    ),
}
_ACCELERATOR = all_from(
    f"{_API}.misc",
    "device_type device_name device current_device set_device synchronize current_stream mem_get_info"
    " autocast is_musa_available is_musa_environment",
)
_ACCELERATOR |= all_from(
    "torch.cuda", "device_count empty_cache memory_allocated memory_reserved manual_seed manual_seed_all"
)
_ACCELERATOR |= none_of(
    "devices are CUDA's or the CPU",
    "use torch.cuda",
    "register_accelerator get_accelerator initialize_accelerator set_accelerator reset_accelerator",
)
_METRICS = all_from(
    f"{_API}.metrics",
    "dict_add_prefix compute_pass_rate compute_statistics compression_ratio has_repetition compute_rollout_step",
)

MODULES: dict[str, Names] = {
    "slime.utils.types": _TYPES,
    "slime.utils.misc": _MISC,
    "slime.utils.http_utils": _HTTP,
    "slime.utils.async_utils": {
        "run": Here("fusionrl.rollout.event_loop:run"),
        **all_from(f"{_API}.misc", "AsyncLoopThread get_async_loop"),
    },
    "slime.utils.mask_utils": {
        "MultiTurnLossMaskGenerator": Here(
            "fusionrl.data.chat:MultiTurnLossMaskGenerator",
            "tokenizer_type is auto by default, which looks at the chat template",
        ),
        "get_response_lengths": Here("fusionrl.data.chat:get_response_lengths"),
    },
    "slime.utils.processing_utils": {
        "load_processor": Here(f"{_API}.datasets:load_processor", "always None: images are not trained on yet"),
        **all_from(
            f"{_API}.datasets",
            "load_tokenizer build_processor_kwargs encode_image_for_rollout_engine DEFAULT_PATCH_SIZE",
        ),
        "process_vision_info": Absent("images are not trained on yet", "give prompts of text"),
    },
    "slime.utils.eval_config": {
        "EvalDatasetConfig": Here("fusionrl.config.eval_sets:EvalSet", "a typed set of the flags; no cache_key"),
        **all_from(f"{_API}.misc", "DATASET_RUNTIME_SPECS _apply_dataset_field_overrides"),
        **none_of(
            "sets are read from the flags", "use args.eval_datasets", "build_eval_dataset_configs pick_from_args"
        ),
    },
    "slime.utils.data": {
        "Dataset": Here(f"{_API}.datasets:Dataset", "a row that cannot be read is an error; another order for a seed"),
        "read_file": Here(f"{_API}.datasets:read_file", "a row that cannot be read is an error"),
        **none_of(
            "prompts are read when the command starts",
            "take them from data_source.get_samples",
            "filter_long_prompt get_source process_rollout_data",
        ),
    },
    "slime.utils.accelerator": _ACCELERATOR,
    "slime.utils.memory_utils": none_of("memory is managed by the run", "remove the call", "clear_memory"),
    "slime.rollout": {},
    "slime.rollout.base_types": {
        **all_from("fusionrl.rollout.types", "RolloutFnTrainOutput RolloutFnEvalOutput"),
        "call_rollout_fn": Here(f"{_API}.rollouts:call_rollout_fn"),
    },
    "slime.rollout.data_source": {
        "RolloutDataSource": Here("fusionrl.buffer.data_source:RolloutDataSource", "has a buffer, too"),
        "RolloutDataSourceWithBuffer": Here("fusionrl.buffer.data_source:RolloutDataSourceWithBuffer"),
        **all_from(f"{_API}.rollouts", "DataSource pop_first"),
    },
    "slime.rollout.filter_hub.base_types": {
        "DynamicFilterOutput": Here("fusionrl.rollout.types:DynamicFilterOutput"),
        **all_from(f"{_API}.rollouts", "call_dynamic_filter should_drop_dynamic_filter_output MetricGatherer"),
    },
    "slime.rollout.filter_hub.dynamic_sampling_filters": all_from(
        "fusionrl.rollout.filters",
        "check_reward_nonzero_std check_reward_nonzero_std_with_fallback",
        "a sample without a reward of its own does not count",
    ),
    "slime.rollout.rm_hub": _RM_HUB,
    "slime.rollout.rm_hub.deepscaler": all_from(f"{_REWARDS}.deepscaler", "get_deepscaler_rule_based_reward"),
    "slime.rollout.rm_hub.f1": all_from(f"{_API}.rewards", "f1_score normalize_answer"),
    "slime.rollout.rm_hub.gpqa": {"compute_gpqa_reward": Here(f"{_REWARDS}.gpqa:compute_gpqa_reward")},
    "slime.rollout.rm_hub.ifbench": {
        "compute_ifbench_reward": Here(
            f"{_REWARDS}.ifbench:compute_ifbench_reward",
            "clones and installs nothing; metadata without instructions is an error",
        )
    },
    "slime.rollout.rm_hub.math_utils": _MATH_UTILS,
    "slime.rollout.rm_hub.math_dapo_utils": _MATH_DAPO,
    "slime.rollout.sft_rollout": {
        "generate_rollout": Here("fusionrl.rollout.sft_rollout:generate_rollout", "with --mode sft")
    },
    "slime.rollout.sglang_rollout": _SGLANG_ROLLOUT,
    "slime.rollout.sglang_streaming_rollout": all_from(f"{_API}.rollouts", "generate_streaming"),
    "slime.rollout.sleep_rollout": all_from(f"{_API}.rollouts", "sleep"),
    "slime.rollout.on_policy_distillation": all_from(f"{_API}.distillation", "reward_func post_process_rewards"),
    "slime.rollout.fully_async_rollout": all_from(
        f"{_API}.fully_async",
        "generate_rollout_fully_async AsyncRolloutWorker",
        "prompts are drawn only during a rollout call; an exception in a group ends the run",
    ),
    "slime.rollout.sample_hooks": {
        **all_from(f"{_API}.rollouts", "apply_rollout_sample_hooks"),
        **none_of("the number of a rollout is in args.rollout_id", "remove the call", "set_current_rollout_id"),
    },
    "slime.backends.sglang_utils.server_control": all_from(
        f"{_API}.http", "abort_server_until_idle abort_servers_until_idle"
    ),
    "slime.rollout.forge_load": none_of(
        "load generation is not built in", "use tools/bench for timings", "generate_rollout"
    ),
    "slime.observability": {},
    "slime.observability.metric_utils": _METRICS,
    "slime.observability.trace_utils": _TRACE_NAMES,
    "slime.observability.timer": all_from(f"{_API}.metrics", "Timer timer"),
    "slime.observability.logging_utils": {
        **all_from(f"{_API}.metrics", "configure_logger log"),
        **none_of("the run opens its trackers", "remove the call", "init_tracking finish_tracking"),
    },
    "slime.observability.tensorboard_utils": {"_TensorboardAdapter": Here(f"{_API}.metrics:TensorboardAdapter")},
    "slime.backends.megatron_utils.cp_utils": _CP,
    "slime.backends.megatron_utils.loss": _LOSS,
    "slime.utils.ppo_utils": {
        **all_from(f"{_API}.losses", "compute_approx_kl compute_policy_loss"),
        **none_of(
            "advantages are made by the estimators of fusionrl.algorithms",
            "give yours by --custom-advantage-function-path (docs/reference/hooks.md)",
            "get_grpo_returns get_reinforce_plus_plus_returns get_advantages_and_returns_batch"
            " get_reinforce_plus_plus_baseline_advantages vanilla_gae chunked_gae compute_gspo_kl"
            " chunked_discounted_returns compute_opsm_mask compute_cispo_loss calculate_log_probs_and_entropy",
        ),
    },
    "slime.agent.aiohttp_threaded": all_from(f"{_API}.http", "FilteredAccessLogger AppHandle run_app_in_thread"),
    "slime.agent.adapters": none_of(*_PROXY, "BaseAdapter OpenAIAdapter AnthropicAdapter"),
    "slime.agent.adapters.openai": none_of(*_PROXY, "OpenAIAdapter"),
    "slime.agent.adapters.anthropic": none_of(*_PROXY, "AnthropicAdapter"),
    "slime.agent.adapters.common": {
        **none_of(
            *_PROXY,
            "BaseAdapter Session Reply call_sglang_generate sid_from_bearer sid_from_body manager_finish_reason",
        ),
        **none_of(*_RECORD, "TurnRecord"),
        **none_of(
            "the session proxy reads messages of both protocols itself",
            "in your own code, join the `text` of the parts of a message's content",
            "flatten_content tool_call_dict",
        ),
    },
    "slime.agent.trajectory": none_of(*_RECORD, "TrajectoryManager TurnRecord MessageNode DriftKind"),
    "slime.agent.parsing": none_of(
        "calls of tools are found by SGLang's parsers",
        "give --tool-call-parser (docs/guides/agents.md)",
        "ParsedModelOutput parse_model_output parse_tool_uses parse_xml_tool_uses",
    ),
    "slime.agent.sandbox": none_of(
        "no service of remote sandboxes is built in",
        "open yours in the agent's function (--agent-path, docs/guides/agents.md); python code of a model runs in"
        " fusionrl.rollout.sandbox.run_python (docs/guides/sandbox.md)",
        "Sandbox E2BSandbox exec_and_wait ensure_agent_user EXIT_TIME_BUDGET_EXCEEDED",
    ),
    "slime.agent.harness": none_of(*_HARNESS, "BaseHarness HarnessContext ClaudeCodeHarness CodexHarness"),
    "slime.agent.harness.common": none_of(
        *_HARNESS, "BaseHarness HarnessContext run_agent install_npm_cli install_node22"
    ),
    "slime.agent.harness.claude_code": none_of(*_HARNESS, "ClaudeCodeHarness"),
    "slime.agent.harness.codex": none_of(*_HARNESS, "CodexHarness"),
}

# Where a module was before August 2026.
MOVED = {
    f"slime.utils.{name}": f"slime.observability.{name}"
    for name in ("metric_utils", "logging_utils", "trace_utils", "tensorboard_utils", "timer")
}
MODULES |= {old: MODULES[new] for old, new in MOVED.items()}

_INSIDE = Absent("it is a part of the framework's own machinery", "the run does this itself; remove the import")
ABSENT_MODULES: dict[str, Absent] = {
    "slime.agent": Absent(
        "agents are trained through the session proxy in front of the router",
        "point the agent's OpenAI or Anthropic client at it: --agent-path (docs/guides/agents.md)",
    ),
    "slime.backends": _INSIDE,
    "slime.backends.megatron_utils.kernels": Absent("its kernels are not here", "use --transformer-impl"),
    "slime.backends.megatron_utils.alignment": Absent(
        "log-probs are not aligned kernel by kernel", "use --use-tis against the mismatch (docs/guides/algorithms.md)"
    ),
    "slime.ray": Absent("a run's processes are started by fusionrl", "start the run with `fusionrl train`"),
    "slime.observability": _INSIDE,
    "slime.utils": _INSIDE,
    "slime.utils.external_utils": Absent(
        "slime's launch scripts in Python start its own train.py", "start the run with `fusionrl train`"
    ),
    "slime.rollout": _INSIDE,
    "slime_plugins.models": Absent(
        "model families are built in (docs/guides/models.md)", "leave --spec out; fusionrl reads the config.json"
    ),
    "slime_plugins.rollout_buffer": Absent(
        "the rollout-buffer server is not packaged", "copy its files next to yours, and name them by path"
    ),
    "slime_plugins.mbridge": Absent("checkpoints are converted by fusionrl", "leave it out"),
}

# ------------------------------------------------------------------------------------------------ names of miles
# Read against the public revision of August 2026 (31f1ca9) of miles, a fork of slime, which has all names above too.
_MILES = f"{_API}.miles"
_CHECKPOINT = (
    "no other engines evaluate saved checkpoints during a run",
    "evaluate with --eval-num-gpus, or a checkpoint with --mode eval (docs/guides/evaluation.md)",
)

MILES: dict[str, Names] = {
    "miles.rollout.base_types": all_from(
        "fusionrl.rollout.miles_inputs",
        "RolloutFnConstructorInput RolloutFnBaseInput RolloutFnTrainInput RolloutFnEvalInput"
        " RolloutFnInput RolloutFnOutput GenerateFnInput GenerateFnOutput",
    ),
    "miles.rollout.filter_hub.dynamic_sampling_filters": {
        "check_no_aborted": Here(
            f"{_MILES}:check_no_aborted", "also drops a group with a FAILED sample, whose agent sent no request"
        ),
    },
    "miles.rollout.generate_hub": {},
    "miles.rollout.generate_hub.agentic_tool_call": {
        "generate": Here(
            f"{_MILES}:agentic_tool_call",
            "through the session proxy (docs/guides/agents.md); custom_agent_function_path is a key of"
            " --custom-config-path; what the agent raises ends the run",
        ),
        "build_chat_request_kwargs": Here(f"{_MILES}:build_chat_request_kwargs", "what the session proxy reads"),
    },
    "miles.rollout.generate_hub.multi_turn": {
        "generate": Here(
            f"{_MILES}:multi_turn",
            "by the agent of docs/guides/agents.md; its arguments generate_… are keys of --custom-config-path",
        )
    },
    "miles.rollout.generate_hub.single_turn": {"generate": Here(f"{_MILES}:single_turn")},
    "miles.rollout.generate_hub.benchmarkers": {
        "generate_with_random_osl": Here(
            f"{_MILES}:generate_with_random_osl", "--rollout-max-context-len still limits the answer"
        )
    },
    "miles.rollout.fully_async_rollout": {
        "FullyAsyncRolloutFn": Here(f"{_API}.fully_async:generate_rollout_fully_async", "a function, not a class")
    },
    "miles.rollout.inference_rollout": {},
    "miles.rollout.inference_rollout.inference_rollout_common": {
        **all_from(_MILES, "InferenceRolloutFn"),
        **all_from("fusionrl.rollout.generate_state", "GenerateState"),
        **all_from("fusionrl.rollout.sglang_rollout", "generate_and_rm generate_and_rm_group"),
    },
    "miles.rollout.inference_rollout.inference_rollout_eval": none_of(*_CHECKPOINT, "run_eval_datasets"),
    "miles.rollout.checkpoint_eval": none_of(*_CHECKPOINT, "CheckpointEvalFn EvalSkip retarget_args"),
    "miles.rollout.generate_utils.prefill_logprobs": none_of(
        "log-probs of engines are not computed again by a prefill",
        "remove the call; the trainers compute their own, and --use-tis corrects for the difference",
        "recompute_samples_rollout_logprobs_via_prefill",
    ),
    "miles.backends.training_utils.cp_utils": MODULES["slime.backends.megatron_utils.cp_utils"],
    "miles.utils.dumper_utils": none_of("engines write no dumps", "remove the call", "configure_sglang"),
    "miles.utils.lora": none_of(
        "whole models are trained, and no adapters", "remove the branch", "LORA_ADAPTER_NAME is_lora_enabled"
    ),
    "miles.utils.file_arg_utils": all_from(f"{_API}.misc", "PSEUDO_FILE_PREFIX resolve_file_arg"),
    "miles.utils.external_utils.exec_command": {
        **dict.fromkeys(("exec_command_cpu", "exec_command_gpu"), Here(f"{_API}.misc:exec_command")),
        **none_of(
            "a run's processes are started by fusionrl", "run it on each node yourself", "exec_command_multi_node"
        ),
    },
}
