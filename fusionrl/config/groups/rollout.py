"""Answers and their rewards: RolloutGroup, RewardGroup, RejectSamplingGroup."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from fusionrl.config.groups.base import Group


class RolloutGroup(Group):
    """Rollout"""

    rollout_function_path: str = Field(
        "fusionrl.rollout.sglang_rollout.generate_rollout", description="Function that generates a rollout."
    )
    eval_function_path: str | None = Field(
        None, description="Function that runs an evaluation. Default: --rollout-function-path."
    )
    custom_generate_function_path: str | None = Field(None, description="Function that generates one sample.")
    tools_path: str | None = Field(
        None,
        description="Function that returns the tools of fusionrl.rollout.agent.generate, `tools(args, sample)`."
        " Default: Python in a sandbox.",
    )
    tool_call_parser: str = Field(
        "auto", description="SGLang parser for tool calls; auto picks the one that fits the chat template."
    )
    max_turns: int = Field(8, description="Maximum model turns in one sample of an agent.", ge=1)
    max_tool_response_len: int = Field(1024, description="Maximum tokens of one tool response; the rest is cut.", ge=1)
    tool_timeout_s: float = Field(
        60.0, description="Time limit of one tool call, seconds; a timeout is reported to the model.", gt=0
    )
    agent_path: str | None = Field(
        None,
        description="Agent of fusionrl.rollout.sessions.generate, `agent(args, sample, base_url, api_key)`, which calls"
        " the model by OpenAI's or Anthropic's protocol (docs/guides/agents.md).",
    )
    agent_timeout_s: float = Field(
        3600.0,
        description="Time limit of one run of that agent, seconds; after that its sample counts as truncated.",
        gt=0,
    )
    agent_free_sampling: bool = Field(
        False,
        description="Sample freely where an agent's request would constrain the model (a forced tool_choice, a"
        " response_format, a grammar); such requests are refused otherwise.",
    )
    rollout_batch_size: int | None = Field(None, description="Prompts in one rollout step.", ge=1)
    n_samples_per_prompt: int = Field(1, description="Samples generated for each prompt.", ge=1)
    partial_rollout: bool = Field(
        False,
        description="Keep the responses unfinished when a rollout has enough groups; continue them in the next.",
    )
    mask_offpolicy_in_partial_rollout: bool = Field(
        False, description="With --partial-rollout: train only on tokens generated in the last rollout of a sample."
    )
    rollout_sample_hook_path: list[str] = Field(
        default_factory=list,
        description="Functions called in order on a sample before it is scored; each may return a replacement.",
    )
    rollout_sample_filter_path: str | None = Field(
        None, description="Function that sets remove_sample on samples that should not be trained on."
    )
    rollout_all_samples_process_path: str | None = Field(
        None,
        description="Function that gets all groups of a rollout, including those beyond the batch. With a streamed"
        " pipeline: the batch, and the groups that the default rollout's filter dropped since the previous batch.",
    )
    custom_rollout_log_function_path: str | None = Field(
        None,
        description="Function that logs a rollout itself; if it returns true, the default metrics are not logged.",
    )
    custom_eval_rollout_log_function_path: str | None = Field(None, description="The same for an evaluation.")
    over_sampling_batch_size: int | None = Field(
        None,
        description="Prompts submitted at a time while a filter drops groups. Default: --rollout-batch-size.",
        ge=1,
    )
    dynamic_sampling_filter_path: str | None = Field(None, description="Function that keeps or drops a finished group.")
    accuracy_lower_bound: float = Field(
        0.2,
        description="For the filter check_accuracy_in_range: lowest share of correct answers in a group.",
        ge=0,
        le=1,
    )
    accuracy_upper_bound: float = Field(0.8, description="For the same: highest share.", ge=0, le=1)
    rollout_temperature: float = Field(1.0, description="Sampling temperature.", gt=0)
    rollout_top_p: float = Field(1.0, description="Nucleus sampling mass.", gt=0, le=1)
    rollout_top_k: int = Field(-1, description="Sample from this many likeliest tokens; -1: all.", ge=-1)
    rollout_max_response_len: int | None = Field(None, description="Maximum new tokens of a response.", ge=1)
    rollout_min_response_len: int = Field(
        0, description="Minimum new tokens of a response; must be 0 in --mode rl.", ge=0
    )
    rollout_max_context_len: int | None = Field(
        None, description="Maximum tokens of prompt and response together.", ge=1
    )
    rollout_stop: list[str] = Field(default_factory=list, description="Strings that end a response.")
    rollout_stop_token_ids: list[int] = Field(default_factory=list, description="Token ids that end a response.")
    rollout_ignore_eos: bool = Field(False, description="Continue after the end-of-sequence token (benchmarks).")
    rollout_skip_special_tokens: bool = Field(True, description="Leave special tokens out of the response's text.")
    sglang_server_concurrency: int = Field(512, description="Maximum requests in flight per engine.", ge=1)
    router_api_key: Literal["auto", "none"] = Field(
        "auto",
        description="Key that the router requires from clients. auto: generated for the run; none: no key, allowed only"
        " on one machine (docs/guides/security.md).",
    )
    stream_responses: bool = Field(
        False,
        description="Stream responses token by token: when an engine dies, another continues from the tokens already"
        " received (--use-fault-tolerance).",
    )
    engine_start_timeout_s: float = Field(
        300.0, description="Time limit for an engine to become healthy, seconds.", gt=0
    )
    engine_num_threads: int = Field(1, description="CPU threads of an engine's forward pass, on a CPU.", ge=1)
    use_fault_tolerance: bool = Field(
        False,
        description="When an engine dies or hangs, continue with the others and restart it before the next weight push"
        " (docs/guides/trouble.md).",
    )
    rollout_health_check_interval: float = Field(
        30.0, description="With --use-fault-tolerance: seconds between health checks of an engine in a rollout.", gt=0
    )
    rollout_health_check_timeout: float = Field(
        30.0, description="Seconds without a token after which an engine counts as hung and is killed.", gt=1
    )
    rollout_health_check_first_wait: float = Field(
        0.0, description="Seconds into a rollout before the first health check.", ge=0
    )


class RewardGroup(Group):
    """Rewards"""

    rm_type: str | None = Field(
        None,
        description="Built-in reward (docs/guides/rewards.md) or a weighted sum: math, math:0.8+format:0.2.",
    )
    rm_format_regex: str | None = Field(
        None, description="Regular expression that the whole response must match, for --rm-type format."
    )
    rm_url: str | None = Field(None, description="Server that scores the samples, for --rm-type remote_rm.")
    rm_model: str | None = Field(
        None,
        description="Hugging Face folder of a reward model (a sequence classifier with one label), for --rm-type"
        " reward_model: it runs in its own engines.",
    )
    rm_input: Literal["auto", "tokens", "chat"] = Field(
        "auto",
        description="Input of the reward model: the sample's tokens, or the conversation in its own chat template."
        " auto: tokens if both models have the same tokenizer.",
    )
    rm_num_gpus: int = Field(1, description="Devices of all engines of the reward model.", ge=1)
    rm_num_gpus_per_engine: int = Field(
        1, description="Devices of each of these engines (its tensor parallel size).", ge=1
    )
    rm_server_args: dict[str, Any] = Field(
        default_factory=dict,
        description="SGLang ServerArgs fields of the reward model's engines, as JSON; --sglang-* are the policy's.",
    )
    custom_rm_path: str | None = Field(None, description="Reward function, `async rm(args, sample, **kw)`.")
    group_rm: bool = Field(False, description="Call the reward function on a whole group; it returns a list.")
    reward_key: str | None = Field(None, description="Key of the reward to train on, if rewards are dicts.")
    eval_reward_key: str | None = Field(None, description="Key of the reward that an evaluation reports.")
    reward_timeout_s: float = Field(60.0, description="Time limit of the reward of one sample, seconds.", gt=0)
    reward_failure_value: float | None = Field(
        None,
        description="Reward of a sample whose reward function raises, hangs or crashes its process; such samples are"
        " counted. Default: none; an exception ends the run, and after a hang or crash the sample is not trained on.",
        allow_inf_nan=False,
    )
    reward_num_processes: int | None = Field(
        None, description="Processes for reward functions that are not async. Default: one per core.", ge=1
    )
    allow_weak_sandbox: bool = Field(
        False,
        description="Run programs of a model (--rm-type code, the Python tool) even if the kernel grants no namespaces."
        " Then only seccomp and Landlock keep them from other processes, files and the network; without Landlock"
        " they can read and write every file of their user. The plan lists the missing protections.",
    )
    overlong_buffer_len: int | None = Field(
        None,
        description="Number of last tokens before --rollout-max-response-len over which a penalty grows from 0 (DAPO).",
        ge=1,
    )
    overlong_penalty_factor: float = Field(1.0, description="Maximum penalty of an overlong response.", gt=0)
    length_penalty_coef: float = Field(
        0.0,
        description="Penalty of a response of --rollout-max-response-len tokens, in proportion for shorter ones.",
        ge=0,
    )
    custom_reward_post_process_path: str | None = Field(
        None, description="Function that turns raw rewards into the rewards to train on."
    )
    custom_convert_samples_to_train_data_path: str | None = Field(
        None, description="Function that turns a rollout's samples into train data: a dict of lists."
    )


class RejectSamplingGroup(Group):
    """Reject sampling"""

    reject_sampling_output: str | None = Field(
        None, description="File of the accepted samples. Default: accepted.jsonl in the run folder."
    )
    reject_sampling_threshold: float = Field(1.0, description="Samples with at least this reward are accepted.")
    reject_sampling_per_prompt: int = Field(1, description="Maximum accepted samples per prompt, best first.", ge=1)
    no_trainer: bool = Field(False, description="reject-sampling without trainers: the engines load the checkpoint.")
