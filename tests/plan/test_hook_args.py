"""slime's names in `args` have the run's values."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.plan import make_plan


def args_of(model: Path, **values: object) -> Any:
    config = Config.from_flat({"hf_checkpoint": str(model), "rollout_batch_size": 4, "rm_type": "exact"} | values)
    return config.to_args(**make_plan(config, read_model_shape(model), device="cpu", num_prompts=8).answers)


def test_names_of_slime_have_the_run_s_values(tiny_model: Path) -> None:
    args = args_of(tiny_model, rollout_max_context_len=64, prompt_data="p.jsonl", disable_rewards_normalization=True)
    shape = read_model_shape(tiny_model)
    assert args.rollout_num_engines >= 1 and args.rollout_num_gpus >= 1
    wanted = {"eval_max_context_len": 64, "over_sampling_batch_size": 4, "grpo_std_normalization": True}
    wanted |= {"rewards_normalization": False, "use_wandb": False, "router_policy": "cache_aware"}
    wanted |= {"multimodal_keys": None, "num_experts": None, "rm_type": "exact"}
    wanted |= {name: getattr(shape, name) for name in ("num_layers", "hidden_size", "vocab_size")}
    wanted |= {"untie_embeddings_and_output_weights": not shape.tie_word_embeddings}
    assert {name: getattr(args, name) for name in wanted} == wanted


# What the user-level code of slime (rollout, agent, examples; revision of August 2026) reads of `args` and does not set
# itself, and arguments of SGLang's server, of which slime's args have all. Four are set by the run: the addresses of
# the router, eval_datasets, and what generate functions keep.
NAMES_READ = """
    apply_chat_template apply_chat_template_kwargs buffer_filter_path chat_template_path ci_test
    context_parallel_size custom_generate_function_path custom_rm_path dump_details dynamic_sampling_filter_path
    eval_max_context_len eval_max_prompt_len eval_min_new_tokens eval_reward_key group_rm grpo_std_normalization
    hf_checkpoint input_key label_key load_forge_rollout_data loss_mask_type mask_offpolicy_in_partial_rollout
    max_tokens_per_gpu max_turns metadata_key multimodal_keys n_samples_per_prompt over_sampling_batch_size
    partial_rollout prompt_data qkv_format reward_key rm_type rm_url rollout_all_samples_process_path
    rollout_batch_size rollout_global_dataset rollout_max_context_len rollout_max_prompt_len
    rollout_max_response_len rollout_sample_filter_path rollout_sample_hook_path rollout_seed rollout_shuffle
    rollout_skip_special_tokens rollout_stop rollout_stop_token_ids rollout_temperature rollout_top_k rollout_top_p
    router_policy sglang_dp_size sglang_enable_deterministic_inference sglang_enable_metrics sglang_model_routers
    sglang_reasoning_parser sglang_server_concurrency sglang_tool_call_parser sglang_log_level
    sglang_mem_fraction_static sglang_context_length sglang_attention_backend tool_key use_rollout_routing_replay
"""


def test_args_have_every_name_that_slime_s_user_level_code_reads(tiny_model: Path) -> None:
    args = args_of(tiny_model)
    missing = [name for name in NAMES_READ.split() if not hasattr(args, name)]
    assert not missing
    assert args.sglang_enable_metrics is False and args.qkv_format == "thd" and args.chat_template_path is None
    for copied in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert copied.sglang_enable_metrics is False and copied.rm_type == "exact"
    for name in ("sglang_no_such_argument", "no_such_flag"):
        assert getattr(args, name, None) is None
        with pytest.raises(AttributeError, match=name):
            getattr(args, name)
