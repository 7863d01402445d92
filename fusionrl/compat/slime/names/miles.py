"""Names that only miles, a fork of slime, has: module path → name → where it lives here, or why it does not.

Read against miles' public revision of August 2026 (31f1ca9). `table.py` has the names of both.
"""

from __future__ import annotations

from fusionrl.compat.slime.names.entries import Here, Names, all_from, none_of
from fusionrl.compat.slime.names.table import MODULES

_API = "fusionrl.compat.slime.api"
_MILES = f"{_API}.miles"
_CHECKPOINT = (
    "no other engines evaluate saved checkpoints during a run",
    "evaluate with --eval-num-gpus, or a checkpoint with --mode eval (docs/guides/evaluation.md)",
)

MILES: dict[str, Names] = {
    "miles.rollout.base_types": all_from(
        "fusionrl.rollout.miles_inputs",
        *("RolloutFnConstructorInput", "RolloutFnBaseInput", "RolloutFnTrainInput", "RolloutFnEvalInput"),
        *("RolloutFnInput", "RolloutFnOutput", "GenerateFnInput", "GenerateFnOutput"),
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
        **all_from("fusionrl.rollout.sglang_rollout", "generate_and_rm", "generate_and_rm_group"),
    },
    "miles.rollout.inference_rollout.inference_rollout_eval": none_of(*_CHECKPOINT, "run_eval_datasets"),
    "miles.rollout.checkpoint_eval": none_of(*_CHECKPOINT, "CheckpointEvalFn", "EvalSkip", "retarget_args"),
    "miles.rollout.generate_utils.prefill_logprobs": none_of(
        "log-probs of engines are not computed again by a prefill",
        "remove the call; the trainers compute their own, and --use-tis corrects for the difference",
        "recompute_samples_rollout_logprobs_via_prefill",
    ),
    "miles.backends.training_utils.cp_utils": MODULES["slime.backends.megatron_utils.cp_utils"],
    "miles.utils.dumper_utils": none_of("engines write no dumps", "remove the call", "configure_sglang"),
    "miles.utils.lora": none_of(
        "whole models are trained, and no adapters", "remove the branch", "LORA_ADAPTER_NAME", "is_lora_enabled"
    ),
    "miles.utils.file_arg_utils": all_from(f"{_API}.eval_config", "PSEUDO_FILE_PREFIX", "resolve_file_arg"),
    "miles.utils.external_utils.exec_command": {
        **dict.fromkeys(("exec_command_cpu", "exec_command_gpu"), Here(f"{_API}.misc:exec_command")),
        **none_of(
            "a run's processes are started by fusionrl", "run it on each node yourself", "exec_command_multi_node"
        ),
    },
}
