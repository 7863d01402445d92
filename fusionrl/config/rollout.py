"""Flags of prompts, answers, rewards, evaluation and reject sampling."""

from typing import Literal

from pydantic import field_serializer, field_validator

from fusionrl.config import scopes
from fusionrl.config.run_parts import DEFAULT_ROLLOUT, DEFAULT_SOURCE
from fusionrl.config.scopes import Group, JsonObject, acting, always, of_engines, of_eval_engines, of_prompts, of_scores

of_images = acting(scopes.needed(scopes.HAS_IMAGES))
of_eval_interval = acting(scopes.TESTS_BETWEEN, scopes.HAS_SETS)
of_eval_sets = acting(scopes.TESTS, scopes.IS_DUE)
of_eval_columns = acting(scopes.TESTS, scopes.HAS_SETS)


class DataGroup(Group):
    """Data"""

    prompt_data: list[str] | None = of_prompts(
        None,
        "Prompts (rl, reject-sampling) or conversations (sft): one or several sets"
        " [NAME=]PATH[:SPLIT][@[START:STOP]], each a .jsonl, .json or .parquet file, a folder of such files or of"
        " datasets.save_to_disk, or a data set of the Hub (openai/gsm8k/main:train). See docs/guides/data.md.",
    )
    prompt_data_weights: list[float] = of_prompts([], "Sampling weights of the prompt sets. Default: by their sizes.")
    input_key: str = always("input", "Column of the prompt (text, or a list of messages).")
    label_key: str | None = always(None, "Column of the label handed to the reward.")
    metadata_key: str = always("metadata", "Column of a JSON object that hooks get unchanged.")
    tool_key: str | None = always(None, "Column of tool definitions handed to the chat template.")
    apply_chat_template: bool = acting(scopes.RENDERS)(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: JsonObject = always({}, "Keyword arguments of the chat template, as JSON.")
    loss_mask_type: Literal[
        "auto", "chatml", "qwen", "qwen3", "qwen3_5", "llama3", "distill_qwen", "prefix", "template"
    ] = acting(scopes.SFT)(
        "auto",
        "How the assistant's tokens of a conversation are found (sft): by the marks of a known template (chatml and"
        " others), by what each turn adds (prefix), or by the template's own generation blocks (template). auto: by"
        " marks, where the generation prompt has known ones.",
    )
    multimodal_keys: JsonObject = always(
        {}, 'Columns of what is not text, as JSON: {"image": COLUMN}. See docs/guides/vision.md.'
    )
    multimodal_folder: str | None = of_images(
        None, "Folder in which relative paths of images begin. Default: that of the data file, or the set's own folder."
    )
    image_max_pixels: int | None = of_images(
        None, "Pixels of an image at most; larger ones are made smaller. Default: the model's.", ge=1
    )
    image_min_pixels: int | None = of_images(
        None, "Pixels of an image at least; smaller ones are made larger. Default: the model's.", ge=1
    )
    image_cache_mb: int = of_images(
        2048, "Megabytes of memory for images; those unused for longest are read again from their files.", ge=1
    )
    rollout_shuffle: bool = of_prompts(False, "Reshuffle the prompts in each epoch.")
    rollout_seed: int = always(42, "Seed of the shuffle and of sampling.", ge=0)
    rollout_max_prompt_len: int | None = of_engines(None, "Leave out, and count, prompts with more tokens.", ge=1)
    data_source_path: str = of_prompts(DEFAULT_SOURCE, "Path of the data source's class; some need no --prompt-data.")
    buffer_filter_path: str | None = of_prompts(None, "Function that chooses which returned groups are used first.")

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_serializer("prompt_data")
    def _one_as_text(self, value: list[str] | None) -> list[str] | str | None:
        """One set is plain text in files and for hooks, as with slime."""
        return value[0] if value is not None and len(value) == 1 else value


class EvalGroup(Group):
    """Evaluation"""

    eval_interval: int | None = acting(scopes.TESTS_BETWEEN, scopes.needed(scopes.HAS_SETS))(
        None, "Rollout steps between evaluations.", ge=1
    )
    eval_prompt_data: list[str] = of_eval_sets(
        [], "Pairs of name and file, `--eval-prompt-data aime aime.jsonl`; files as for --prompt-data."
    )
    eval_config: str | None = of_eval_sets(
        None, "YAML file of evaluation sets with settings of their own (docs/guides/evaluation.md)."
    )
    skip_eval_before_train: bool = of_eval_interval(False, "Skip the evaluation before the first step.")
    eval_input_key: str | None = of_eval_columns(None, "As --input-key, for evaluation.")
    eval_label_key: str | None = of_eval_columns(None, "As --label-key, for evaluation.")
    n_samples_per_eval_prompt: int = of_eval_engines(1, "Samples of each evaluation prompt.", ge=1)
    eval_temperature: float | None = of_eval_engines(None, "0 is greedy. Default: --rollout-temperature.", ge=0)
    eval_top_p: float | None = of_eval_engines(None, "As --rollout-top-p, for evaluation.", gt=0, le=1)
    eval_top_k: int | None = of_eval_engines(None, "As --rollout-top-k, for evaluation.", ge=-1)
    eval_max_response_len: int | None = of_eval_engines(None, "As --rollout-max-response-len.", ge=1)
    eval_num_gpus: int = acting(
        scopes.NEEDS_PROCESSES, *map(scopes.needed, (scopes.EVALUATES, scopes.HAS_SETS, scopes.IS_DUE))
    )(0, "Extra devices for engines that only evaluate. 0: the policy's engines do, and training waits.", ge=0)

    @property
    def has_sets(self) -> bool:
        return bool(self.eval_prompt_data or self.eval_config)


of_agents = acting(scopes.ENGINES, scopes.AGENT)
of_generation = acting(scopes.GENERATES)
of_filters = acting(scopes.GENERATES, scopes.FILTERS)
of_samples = acting(scopes.NOT_SFT)
of_health_checks = acting(scopes.ENGINES, scopes.FAULT_TOLERANCE)
of_reward_model = acting(scopes.ENGINES, scopes.REWARD_MODEL)
only_of_rl = acting(scopes.needed(scopes.RL))
of_reject_sampling = acting(scopes.REJECTS)


class RolloutGroup(Group):
    """Rollout"""

    rollout_function_path: str = acting(scopes.ROLLOUT_FUNCTION)(DEFAULT_ROLLOUT, "Function that generates a rollout.")
    eval_function_path: str | None = of_eval_engines(None, "Function that evaluates. Default: --rollout-function-path.")
    custom_generate_function_path: str | None = of_engines(None, "Function that generates one sample.")
    tools_path: str | None = of_agents(
        None, "Tools of fusionrl.rollout.agent.generate, `tools(args, sample)`. Default: Python in a sandbox."
    )
    tool_call_parser: str = of_agents(
        "auto", "SGLang parser for tool calls; auto picks the one that fits the chat template."
    )
    max_turns: int = of_agents(8, "Maximum model turns in one sample of an agent.", ge=1)
    max_tool_response_len: int = of_agents(1024, "Maximum tokens of one tool response; the rest is cut.", ge=1)
    max_tool_images: int = of_agents(
        8, "Maximum images that tools may add to one sample; then the model gets an error message.", ge=0
    )
    zoom_coordinates: Literal["auto", "pixels", "thousandths"] = of_agents(
        "auto",
        "What boxes of image_zoom_in_tool count: pixels of the image as the model sees it, or thousandths of its sides;"
        " auto: as models of this family were trained.",
    )
    tool_timeout_s: float = of_agents(60.0, "Seconds a tool call may take; then the model gets an error message.", gt=0)
    agent_path: str | None = of_agents(
        None, "`agent(args, sample, base_url, api_key)` of fusionrl.rollout.sessions.generate (docs/guides/agents.md)."
    )
    agent_timeout_s: float = of_agents(
        3600.0, "Time limit of one run of that agent, seconds; after that its sample counts as truncated.", gt=0
    )
    agent_free_sampling: bool = of_agents(
        False, "Sample freely where an agent's request constrains the model (tool_choice, grammar), not refuse it."
    )
    image_transport: Literal["auto", "data", "file"] = of_engines(
        "auto",
        "How engines get images: in requests (data), or as files in the run's folder; auto: file where all engines are"
        " on this machine.",
    )
    rollout_batch_size: int | None = acting(scopes.STEPS)(None, "Prompts in one rollout step.", ge=1)
    n_samples_per_prompt: int = of_scores(1, "Samples generated for each prompt.", ge=1)
    partial_rollout: bool = of_generation(False, "When a rollout has enough groups, continue the rest in the next.")
    mask_offpolicy_in_partial_rollout: bool = acting(scopes.GENERATES, scopes.PARTIAL)(
        False, "With --partial-rollout: train only on tokens generated in the last rollout of a sample."
    )
    rollout_sample_hook_path: list[str] = of_engines(
        [], "Functions called in order on a sample before it is scored; each may return a replacement."
    )
    rollout_sample_filter_path: str | None = of_prompts(
        None, "Function that sets remove_sample on samples that should not be trained on."
    )
    rollout_all_samples_process_path: str | None = of_prompts(
        None,
        "Function that gets all groups of a rollout, including those beyond the batch. With a streamed"
        " pipeline: the batch, and the groups that the default rollout's filter dropped since the previous batch.",
    )
    custom_rollout_log_function_path: str | None = of_scores(
        None, "Function that logs a rollout itself; if it returns true, the default metrics are not logged."
    )
    custom_eval_rollout_log_function_path: str | None = of_eval_engines(None, "The same for an evaluation.")
    over_sampling_batch_size: int | None = of_generation(
        None, "Prompts submitted at a time while a filter drops groups. Default: --rollout-batch-size.", ge=1
    )
    dynamic_sampling_filter_path: str | None = of_generation(None, "Function that keeps or drops a finished group.")
    accuracy_lower_bound: float = of_filters(
        0.2, "For the filter check_accuracy_in_range: lowest share of correct answers in a group.", ge=0, le=1
    )
    accuracy_upper_bound: float = of_filters(0.8, "For the same: highest share.", ge=0, le=1)
    rollout_temperature: float = of_samples(1.0, "Sampling temperature.", gt=0)
    rollout_top_p: float = of_engines(1.0, "Nucleus sampling mass.", gt=0, le=1)
    rollout_top_k: int = of_engines(-1, "Sample from this many likeliest tokens; -1: all.", ge=-1)
    rollout_max_response_len: int | None = of_samples(None, "Maximum new tokens of a response.", ge=1)
    rollout_min_response_len: int = of_engines(0, "Minimum new tokens of a response; must be 0 in --mode rl.", ge=0)
    rollout_max_context_len: int | None = of_engines(None, "Maximum tokens of prompt and response together.", ge=1)
    rollout_stop: list[str] = of_engines([], "Strings that end a response.")
    rollout_stop_token_ids: list[int] = of_engines([], "Token ids that end a response.")
    rollout_ignore_eos: bool = of_engines(False, "Continue after the end-of-sequence token (benchmarks).")
    rollout_skip_special_tokens: bool = of_engines(True, "Leave special tokens out of the response's text.")
    sglang_server_concurrency: int = of_engines(512, "Maximum requests in flight per engine.", ge=1)
    router_api_key: Literal["auto", "none"] = of_engines(
        "auto", "Key of the router: made for the run, or none, only on one machine (docs/guides/security.md)."
    )
    stream_responses: bool = of_engines(
        False, "Stream responses token by token: when an engine dies, another continues them (--use-fault-tolerance)."
    )
    engine_start_timeout_s: float = of_engines(300.0, "Time limit for an engine to become healthy, seconds.", gt=0)
    engine_num_threads: int = acting(scopes.ENGINES, scopes.ON_A_CPU)(
        1, "CPU threads of an engine's forward pass, on a CPU.", ge=1
    )
    use_fault_tolerance: bool = acting(scopes.ENGINES, scopes.NEEDS_PROCESSES)(
        False, "When an engine dies or hangs, continue with the others and restart it (docs/guides/trouble.md)."
    )
    rollout_health_check_interval: float = of_health_checks(
        30.0, "With --use-fault-tolerance: seconds between health checks of an engine in a rollout.", gt=0
    )
    rollout_health_check_timeout: float = of_health_checks(
        30.0, "Seconds without a token after which an engine counts as hung and is killed.", gt=1
    )
    rollout_health_check_first_wait: float = of_health_checks(0.0, "Seconds into a rollout before the first one.", ge=0)


class RewardGroup(Group):
    """Rewards"""

    rm_type: str | None = of_engines(
        None, "Built-in reward (docs/guides/rewards.md) or a weighted sum: math, math:0.8+format:0.2."
    )
    rm_format_regex: str | None = of_engines(None, "Regular expression for the whole response, for --rm-type format.")
    rm_url: str | None = of_engines(None, "Server that scores the samples, for --rm-type remote_rm.")
    rm_model: str | None = of_engines(
        None, "Hugging Face folder of a reward model (a sequence classifier, one label), for --rm-type reward_model."
    )
    rm_input: Literal["auto", "tokens", "chat"] = of_reward_model(
        "auto", "Input of the reward model: tokens, or the chat in its own template. auto: tokens if tokenizers agree."
    )
    rm_num_gpus: int = of_reward_model(1, "Devices of all engines of the reward model.", ge=1)
    rm_num_gpus_per_engine: int = of_reward_model(
        1, "Devices of each of these engines (its tensor parallel size).", ge=1
    )
    rm_server_args: JsonObject = of_reward_model(
        {}, "SGLang ServerArgs fields of the reward model's engines, as JSON; --sglang-* are the policy's."
    )
    custom_rm_path: str | None = of_engines(None, "Reward function, `async rm(args, sample, **kw)`.")
    group_rm: bool = acting(scopes.ENGINES, scopes.CUSTOM_REWARD)(
        False, "Call the reward function on a whole group; it returns a list."
    )
    reward_key: str | None = of_samples(None, "Key of the reward to train on, if rewards are dicts.")
    eval_reward_key: str | None = of_eval_engines(None, "Key of the reward that an evaluation reports.")
    reward_timeout_s: float = of_engines(60.0, "Time limit of the reward of one sample, seconds.", gt=0)
    reward_failure_value: float | None = of_engines(
        None,
        "Reward of a sample whose reward function raises, hangs or crashes its process. Default: none; an exception"
        " ends the run, and after a hang or crash the sample is not trained on.",
        allow_inf_nan=False,
    )
    reward_num_processes: int | None = of_engines(
        None, "Processes for reward functions that are not async. Default: one per core.", ge=1
    )
    allow_weak_sandbox: bool = of_engines(
        False,
        "Run programs of a model (--rm-type code, the Python tool) even if the kernel grants no namespaces: then only"
        " seccomp and Landlock keep them from other processes, files and the network (docs/guides/sandbox.md).",
    )
    overlong_buffer_len: int | None = only_of_rl(
        None, "Number of last tokens before --rollout-max-response-len over which a penalty grows from 0 (DAPO).", ge=1
    )
    overlong_penalty_factor: float = acting(scopes.RL, scopes.OVERLONG)(
        1.0, "Maximum penalty of an overlong response.", gt=0
    )
    length_penalty_coef: float = only_of_rl(
        0.0, "Penalty of a response of --rollout-max-response-len tokens, in proportion for shorter ones.", ge=0
    )
    custom_reward_post_process_path: str | None = of_scores(None, "Function that turns rewards into those to train on.")
    custom_convert_samples_to_train_data_path: str | None = acting(scopes.TRAINS, scopes.RL)(
        None, "Function that turns a rollout's samples into train data: a dict of lists."
    )


class RejectSamplingGroup(Group):
    """Reject sampling"""

    reject_sampling_output: str | None = of_reject_sampling(
        None, "File of the accepted samples. Default: accepted.jsonl in the run folder."
    )
    reject_sampling_threshold: float = of_reject_sampling(1.0, "Samples with at least this reward are accepted.")
    reject_sampling_per_prompt: int = of_reject_sampling(1, "Maximum accepted samples per prompt, best first.", ge=1)
    no_trainer: bool = acting(scopes.needed(scopes.REJECTS))(False, "No trainers: the engines load the checkpoint.")
