"""The flags of fusionrl: one pydantic group a topic, one field a flag.

A field `rollout_batch_size` is the flag `--rollout-batch-size`; its description is the help text and the line of
the flag reference. Names are slime's and Megatron's wherever the meaning is the same. Field names are unique over
all groups, so that hooks can be handed one flat namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator

from fusionrl.algorithms.estimators import ESTIMATORS
from fusionrl.algorithms.losses import LOSSES
from fusionrl.config.pipelines import PIPELINES
from fusionrl.config.presets import PRESETS

# The tables decide what these flags take. A type checker cannot read a Literal of a table.
if TYPE_CHECKING:
    AlgorithmName = str
    EstimatorName = str
    PolicyLossName = str
    PipelineName = str
else:
    AlgorithmName = Literal[tuple(PRESETS)]
    EstimatorName = Literal[tuple(ESTIMATORS)]
    PipelineName = Literal[tuple(PIPELINES)]
    PolicyLossName = Literal[("auto", *(name for name, loss in LOSSES.items() if loss.is_flag))]


class Group(BaseModel):
    """Base of every group: strict, frozen, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class RunGroup(Group):
    """Run: what is done, and where its files go"""

    mode: Literal["rl", "sft", "reject-sampling", "eval"] = Field(
        "rl",
        description="What the run does: rl, sft, reject-sampling or eval. Each toggles engines and trainers.",
    )
    pipeline: PipelineName = Field("on-policy", description="How generation and training overlap.")
    name: str = Field("run", description="Name of the run, part of the default run folder.", pattern=r"^[\w.+-]+$")
    run_dir: str | None = Field(None, description="Folder of the run. Default: runs/<name>-<time>.")
    run_dir_mode: Literal["700", "750", "755", "770", "775"] = Field(
        "700", description="Rights of the run's folders, in octal; files have the same less execution."
    )
    hook_env: list[str] = Field(
        default_factory=list,
        description="Environment variables with secrets (names such as OPENAI_API_KEY) that your functions get. No"
        " process of the run gets others; docs/security.md.",
    )
    resume: bool = Field(
        False,
        description="Go on in --run-dir from its last checkpoint (from the start where there is none yet).",
    )
    seed: int = Field(1234, description="Seed of initialisation, data order and trainers.", ge=0)
    num_rollout: int | None = Field(None, description="Number of rollout steps to run.", ge=0)
    num_epoch: int | None = Field(
        None, description="Epochs over the prompt data, where --num-rollout is not given.", ge=1
    )
    use_tensorboard: bool = Field(False, description="Write TensorBoard event files into the run folder as well.")
    dry_run: bool = Field(False, description="Check everything, print the plan and stop before Ray starts.")
    dashboard: bool = Field(False, description="Start Ray's dashboard with a cluster that is started here.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Level of the log files.")
    log_samples: int = Field(
        0,
        description="Samples of each rollout (rl, reject-sampling) that the console shows, a line each: reward, label,"
        " answer, prompt. `fusionrl show` shows all of them afterwards.",
        ge=0,
    )
    custom_config_path: str | None = Field(
        None, description="YAML file of names and values of one's own, which hooks find in their `args`."
    )
    debug_rollout_only: bool = Field(False, description="Run the engines and the Buffer alone; nothing is trained.")
    debug_train_only: bool = Field(
        False, description="Run the trainers alone on rollouts saved before (--load-debug-rollout-data)."
    )
    load_debug_rollout_data: str | None = Field(
        None, description="Path template with {rollout_id} of rollouts to train on instead of generating."
    )
    save_debug_rollout_data: str | None = Field(
        None, description="Path template with {rollout_id} to save each rollout's samples for later replay."
    )


class ClusterGroup(Group):
    """Cluster: devices and placement"""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Device of engines and trainers.")
    ray_address: str | None = Field(
        None, description="Address of a Ray cluster that runs already; by default a local one is started."
    )
    allow_open_ray: bool = Field(
        False, description="Join a Ray cluster that asks nobody for a token: whoever reaches it can run code in it."
    )
    actor_num_nodes: int = Field(1, description="Nodes of the trainers.", ge=1)
    actor_num_gpus_per_node: int = Field(
        1, description="Trainer ranks a node; devices are GPUs, or processes on a CPU.", ge=1
    )
    rollout_num_gpus: int | None = Field(
        None,
        description="Devices of the engines in all. Default: the trainers' when colocated, else 1.",
        ge=1,
    )
    rollout_num_gpus_per_engine: int = Field(1, description="Devices of one engine (its tensor parallel size).", ge=1)
    num_gpus_per_node: int = Field(8, description="Devices a node has, at most, when a placement is planned.", ge=1)
    colocate: bool = Field(False, description="Engines and trainers share the same devices.")
    offload_rollout: bool = Field(
        True, description="Colocated on GPUs: engines give their memory back while the trainers work."
    )
    offload_train: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Trainers copy weights, gradient buffers and optimizer out while engines generate: to host memory"
        " on a GPU, to a file on a CPU. auto: when colocated on GPUs.",
    )
    offload_folder: str | None = Field(
        None, description="Folder of such files on a CPU. Default: the system's for temporary files."
    )
    distributed_timeout_minutes: int = Field(10, description="Time limit of a collective operation, minutes.", ge=1)
    placement_timeout_s: float = Field(
        120.0, description="Time limit for the cluster to provide the devices, seconds.", gt=0
    )
    train_num_threads: int | None = Field(
        None, description="CPU threads of one trainer rank. Default: cores shared out over the ranks.", ge=1
    )


class ModelGroup(Group):
    """Model and precision"""

    hf_checkpoint: str | None = Field(
        None,
        description="Hugging Face folder, or a name of the Hub (Qwen/Qwen3-0.6B; so do other flags of such folders):"
        " the model's shape, its tokenizer and the weights the run starts with.",
    )
    debug_random_weights: bool = Field(
        False,
        description="Train random weights of --hf-checkpoint's shape: for benchmarks. Only its config.json is read.",
    )
    megatron_checkpoint: str | None = Field(
        None,
        description="Folder of a Megatron checkpoint (torch_dist: Megatron-LM's, slime's or our own) whose weights the"
        " run starts with; config and tokenizer are still --hf-checkpoint's.",
    )
    custom_model_provider_path: str | None = Field(
        None, description="Function that builds a pipeline stage of the policy: Megatron's GPTModel, with its names."
    )
    ref_load: str | None = Field(
        None,
        description="Hugging Face folder of the reference model of the KL terms. Default: what the run starts with.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Precision of the trainers; auto is bf16 on GPUs and fp32 on a CPU."
    )
    rollout_dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Precision of the engines; auto is the trainers'."
    )
    transformer_impl: Literal["auto", "local", "transformer_engine"] = Field(
        "auto",
        description="Layer implementation; auto is Transformer Engine's where it is installed, on GPUs.",
    )
    tensor_model_parallel_size: int = Field(1, description="Tensor parallel size of the trainers.", ge=1)
    pipeline_model_parallel_size: int = Field(1, description="Pipeline parallel size of the trainers.", ge=1)
    virtual_pipeline_model_parallel_size: int | None = Field(
        None, description="Model chunks that each pipeline rank holds (interleaved 1F1B). Default: 1.", ge=1
    )
    num_layers_per_virtual_pipeline_stage: int | None = Field(
        None, description="Layers of each such chunk; the other way to say the same.", ge=1
    )
    context_parallel_size: int = Field(1, description="Context parallel size of the trainers.", ge=1)
    expert_model_parallel_size: int = Field(1, description="Expert parallel size of the trainers.", ge=1)
    expert_tensor_parallel_size: int | None = Field(
        None, description="Tensor parallel size of the experts. Default: --tensor-model-parallel-size.", ge=1
    )


class DataGroup(Group):
    """Data"""

    prompt_data: list[str] | None = Field(
        None,
        description="Prompts (rl, reject-sampling) or conversations (sft): one or several sets"
        " [NAME=]PATH[:SPLIT][@[START:STOP]], each a .jsonl, .json or .parquet file, a folder of such files or of"
        " datasets.save_to_disk, or a data set of the Hub (openai/gsm8k/main:train). See docs/data.md.",
    )
    prompt_data_weights: list[float] = Field(
        default_factory=list,
        description="Weights by which groups are drawn of several sets. Default: their numbers of prompts.",
    )
    input_key: str = Field("input", description="Column of the prompt (text, or a list of messages).")
    label_key: str | None = Field(None, description="Column of the label handed to the reward.")
    metadata_key: str = Field("metadata", description="Column of a JSON object that reaches hooks untouched.")
    tool_key: str | None = Field(None, description="Column of tool definitions handed to the chat template.")
    apply_chat_template: bool = Field(False, description="Render prompts by the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the chat template, as JSON."
    )
    loss_mask_type: Literal[
        "auto", "chatml", "qwen", "qwen3", "qwen3_5", "llama3", "distill_qwen", "prefix", "template"
    ] = Field(
        "auto",
        description="How the assistant's tokens of a conversation are found (sft): by the marks of a known template"
        " (chatml, and qwen, qwen3, qwen3_5, which speak it; llama3; distill_qwen), by what each turn adds (prefix), or"
        " by the template's own generation blocks. auto: the marks, where the template's generation prompt has known"
        " ones.",
    )
    rollout_shuffle: bool = Field(False, description="Shuffle the prompts anew in each epoch.")
    rollout_seed: int = Field(42, description="Seed of the shuffle and of sampling.", ge=0)
    rollout_max_prompt_len: int | None = Field(
        None, description="Prompts of more tokens are left out, and counted.", ge=1
    )
    data_source_path: str = Field(
        "fusionrl.buffer.data_source.RolloutDataSource",
        description="Class of the data source, by import path.",
    )
    buffer_filter_path: str | None = Field(
        None, description="Function that chooses which of the groups that were handed back come first."
    )

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_serializer("prompt_data")
    def _one_as_text(self, value: list[str] | None) -> list[str] | str | None:
        """One set is plain text in files and for hooks, as with slime."""
        return value[0] if value is not None and len(value) == 1 else value


class RolloutGroup(Group):
    """Rollout"""

    rollout_function_path: str = Field(
        "fusionrl.rollout.sglang_rollout.generate_rollout", description="Function that makes a rollout."
    )
    eval_function_path: str | None = Field(
        None, description="Function that evaluates. Default: --rollout-function-path."
    )
    custom_generate_function_path: str | None = Field(None, description="Function that generates one sample.")
    tools_path: str | None = Field(
        None,
        description="Function that returns the tools of fusionrl.rollout.agent.generate, `tools(args, sample)`."
        " Default: Python in a sandbox.",
    )
    tool_call_parser: str = Field(
        "auto", description="SGLang's parser of tool calls; auto is the one that fits the chat template."
    )
    max_turns: int = Field(8, description="Turns of the model in one sample of an agent, at most.", ge=1)
    max_tool_response_len: int = Field(1024, description="Tokens of one tool's answer; what is beyond is cut.", ge=1)
    tool_timeout_s: float = Field(60.0, description="Time limit of one tool call, seconds; the model is told.", gt=0)
    rollout_batch_size: int | None = Field(None, description="Prompts of one rollout step.", ge=1)
    n_samples_per_prompt: int = Field(1, description="Samples generated for each prompt.", ge=1)
    partial_rollout: bool = Field(
        False,
        description="Keep what is unfinished when a rollout has enough groups, and go on with it in the next one.",
    )
    mask_offpolicy_in_partial_rollout: bool = Field(
        False, description="With --partial-rollout: train only on the tokens of the last rollout that made a sample."
    )
    rollout_sample_hook_path: list[str] = Field(
        default_factory=list,
        description="Functions, one after the other, that see a sample before it is scored; one may return another.",
    )
    rollout_sample_filter_path: str | None = Field(
        None, description="Function that sets remove_sample on samples of a rollout that are not to be trained on."
    )
    rollout_all_samples_process_path: str | None = Field(
        None, description="Function that sees all groups of a rollout, those beyond the batch included."
    )
    custom_rollout_log_function_path: str | None = Field(
        None,
        description="Function that reports a rollout itself; where it returns true, the usual metrics are left out.",
    )
    custom_eval_rollout_log_function_path: str | None = Field(None, description="The same for an evaluation.")
    over_sampling_batch_size: int | None = Field(
        None,
        description="Prompts submitted at a time while a filter drops groups. Default: --rollout-batch-size.",
        ge=1,
    )
    dynamic_sampling_filter_path: str | None = Field(None, description="Function that keeps or drops a finished group.")
    accuracy_lower_bound: float = Field(
        0.2, description="For the filter check_accuracy_in_range: lowest share of right answers in a group.", ge=0, le=1
    )
    accuracy_upper_bound: float = Field(0.8, description="For the same: highest share.", ge=0, le=1)
    rollout_temperature: float = Field(1.0, description="Sampling temperature.", gt=0)
    rollout_top_p: float = Field(1.0, description="Nucleus sampling mass.", gt=0, le=1)
    rollout_top_k: int = Field(-1, description="Number of likeliest tokens sampled from; -1 is all.", ge=-1)
    rollout_max_response_len: int | None = Field(None, description="Most new tokens of a response.", ge=1)
    rollout_min_response_len: int = Field(0, description="Fewest new tokens of a response.", ge=0)
    rollout_max_context_len: int | None = Field(None, description="Most tokens of prompt and response.", ge=1)
    rollout_stop: list[str] = Field(default_factory=list, description="Strings that end a response.")
    rollout_stop_token_ids: list[int] = Field(default_factory=list, description="Token ids that end a response.")
    rollout_ignore_eos: bool = Field(False, description="Go on after the end-of-sequence token (benchmarks).")
    rollout_skip_special_tokens: bool = Field(True, description="Leave special tokens out of the response's text.")
    sglang_server_concurrency: int = Field(512, description="Requests in flight for each engine, at most.", ge=1)
    stream_responses: bool = Field(
        False,
        description="Engines send a response token by token: what one that died had sent is kept, and another goes on"
        " from there (--use-fault-tolerance).",
    )
    engine_start_timeout_s: float = Field(
        300.0, description="Time limit for an engine to become healthy, seconds.", gt=0
    )
    engine_num_threads: int = Field(1, description="CPU threads of an engine's forward pass, on a CPU.", ge=1)
    use_fault_tolerance: bool = Field(
        False,
        description="Go on with the other engines when one dies or hangs, and start it anew before the next weight push"
        " (docs/faults.md).",
    )
    rollout_health_check_interval: float = Field(
        30.0, description="With --use-fault-tolerance: seconds between health checks of an engine in a rollout.", gt=0
    )
    rollout_health_check_timeout: float = Field(
        30.0, description="Seconds without a token after which an engine counts as hung, and is ended.", gt=1
    )
    rollout_health_check_first_wait: float = Field(
        0.0, description="Seconds of a rollout before its first health check.", ge=0
    )


class RewardGroup(Group):
    """Rewards"""

    rm_type: str | None = Field(
        None,
        description="Built-in reward of docs/rewards.md, or a weighted sum: math, boxed_exact, math:0.8+format:0.2.",
    )
    rm_format_regex: str | None = Field(
        None, description="Regular expression that --rm-type format wants of the whole response."
    )
    rm_url: str | None = Field(None, description="Server that scores the samples, for --rm-type remote_rm.")
    rm_model: str | None = Field(
        None,
        description="Hugging Face folder of a reward model (a sequence classifier with one label), for --rm-type"
        " reward_model: engines of its own serve it.",
    )
    rm_input: Literal["auto", "tokens", "chat"] = Field(
        "auto",
        description="What the reward model reads: the sample's tokens, or the conversation by its own chat template."
        " auto: the tokens, where its tokenizer has the same ones.",
    )
    rm_num_gpus: int = Field(1, description="Devices of the reward model's engines in all.", ge=1)
    rm_num_gpus_per_engine: int = Field(1, description="Devices of one of them (its tensor parallel size).", ge=1)
    rm_server_args: dict[str, Any] = Field(
        default_factory=dict,
        description="SGLang ServerArgs fields of the reward model's engines, as JSON; --sglang-* are the policy's.",
    )
    custom_rm_path: str | None = Field(None, description="Reward function, `async rm(args, sample, **kw)`.")
    group_rm: bool = Field(False, description="The reward function gets a whole group, and returns a list.")
    reward_key: str | None = Field(None, description="Key of the reward that is trained on, where it is a dict.")
    eval_reward_key: str | None = Field(None, description="Key of the reward that an evaluation reports.")
    reward_timeout_s: float = Field(60.0, description="Time limit of the reward of one sample, seconds.", gt=0)
    reward_failure_value: float = Field(
        0.0,
        description="Reward of a sample whose reward function hangs or takes its process down; counted.",
        allow_inf_nan=False,
    )
    reward_num_processes: int | None = Field(
        None, description="Processes that run reward functions which are not async. Default: one a core.", ge=1
    )
    allow_weak_sandbox: bool = Field(
        False,
        description="Run programs of a model (--rm-type code, the Python tool) also where the kernel grants no"
        " namespaces. Then they are kept from other processes, files and the network by seccomp and Landlock alone,"
        " and without Landlock they read and write every file of their user; the plan says what is lacking.",
    )
    overlong_buffer_len: int | None = Field(
        None, description="Last tokens of --rollout-max-response-len in which a penalty grows from 0 (DAPO).", ge=1
    )
    overlong_penalty_factor: float = Field(1.0, description="The penalty of an overlong response.", gt=0)
    length_penalty_coef: float = Field(
        0.0,
        description="The price of a response of --rollout-max-response-len tokens; shorter ones pay their share.",
        ge=0,
    )
    custom_reward_post_process_path: str | None = Field(
        None, description="Function that turns raw rewards into the rewards that are trained on."
    )
    custom_convert_samples_to_train_data_path: str | None = Field(
        None, description="Function that makes the train data of a rollout's samples: a dict of lists."
    )


class AlgorithmGroup(Group):
    """Algorithm"""

    algorithm: AlgorithmName | None = Field(
        None,
        description="Set the flags of a published algorithm (docs/algorithms.md); those that are given besides count.",
    )
    advantage_estimator: EstimatorName = Field(
        "grpo",
        description="Advantage estimator (docs/algorithms.md); gspo and cispo are grpo's with a policy loss of theirs.",
    )
    pass_k: int = Field(1, description="Answers that count as one try, for --advantage-estimator pass_at_k.", ge=1)
    gamma: float = Field(1.0, description="Discount of token rewards (reinforce_plus_plus, ppo, prime).", ge=0, le=1)
    lambd: float = Field(1.0, description="Lambda of GAE (ppo).", ge=0, le=1)
    bootstrap_truncated: bool = Field(
        False,
        description="GAE (ppo): after a response cut at its length limit stands the critic's last value, not 0.",
    )
    normalize_advantages: bool = Field(
        False,
        description="Whiten advantages over all tokens of a rollout; reinforce_plus_plus and prime always do.",
    )
    kl_coef: float = Field(
        0.0,
        description="Price of the KL to the reference in each token's reward (reinforce_plus_plus, ppo).",
        ge=0,
    )
    kl_coef_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "k1",
        description="Estimator of that KL; k2 and k3 are never negative and also charge for being less likely.",
    )
    policy_loss: PolicyLossName = Field(
        "auto",
        description="Policy loss (docs/algorithms.md); auto is gspo or cispo for the estimators of that name, or ppo.",
    )
    custom_policy_loss_path: str | None = Field(
        None, description="Function that computes the policy loss of each token, in place of --policy-loss."
    )
    loss_aggregation: Literal["auto", "token_mean", "sequence_mean", "constant"] = Field(
        "auto",
        description="How tokens' losses become one: mean over all tokens, over samples of their token means, or over"
        " samples of their sums / --loss-length. auto: as --calculate-per-token-loss says.",
    )
    loss_length: int | None = Field(
        None,
        description="Length that --loss-aggregation constant divides by. Default: --rollout-max-response-len.",
        ge=1,
    )
    custom_pg_loss_reducer_function_path: str | None = Field(
        None, description="Function that makes the function by which a micro-batch's policy losses become one number."
    )
    disable_grpo_std_normalization: bool = Field(False, description="Do not divide by the group's deviation.")
    disable_rewards_normalization: bool = Field(False, description="Use raw rewards as advantages.")
    eps_clip: float = Field(0.2, description="Lower clip range of the policy ratio.", gt=0)
    eps_clip_high: float | None = Field(None, description="Upper clip range. Default: --eps-clip.", gt=0)
    eps_clip_c: float | None = Field(
        None, description="Dual clip: a negative advantage's loss is at most so many times its size.", gt=1
    )
    sapo_tau_pos: float = Field(1.0, description="SAPO's temperature for positive advantages.", gt=0)
    sapo_tau_neg: float = Field(1.05, description="SAPO's temperature for other advantages.", gt=0)
    clip_cov_fraction: float = Field(2e-4, description="Share of tokens that clip_cov detaches.", gt=0, le=1)
    clip_cov_low: float = Field(1.0, description="Lowest covariance of such a token.")
    clip_cov_high: float = Field(5.0, description="Highest covariance of such a token.")
    kl_cov_fraction: float = Field(2e-4, description="Share of tokens that kl_cov penalises.", gt=0, le=1)
    kl_cov_coef: float = Field(1.0, description="Weight of that penalty.", ge=0)
    dpo_beta: float = Field(0.1, description="DPO's beta: what a nat of divergence from the reference costs.", gt=0)
    dpo_label_smoothing: float = Field(
        0.0, description="DPO: the chance that a pair is the wrong way round.", ge=0, lt=0.5
    )
    use_tis: bool = Field(
        False,
        description="Weigh tokens by how likely the trainers find them against the engine (importance sampling).",
    )
    tis_clip: float = Field(2.0, description="Highest such weight.", gt=0)
    tis_clip_low: float = Field(0.0, description="Lowest such weight.", ge=0)
    tis_level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="Of what the weight is: a token, the product over its sample, or the geometric mean over it.",
    )
    tis_mode: Literal["truncate", "mask", "none"] = Field(
        "truncate", description="What becomes of weights outside of the range: moved into it, or 0; none: all are 1."
    )
    tis_veto: float | None = Field(
        None, description="Leave out samples with a token that the trainers find so many times less likely.", gt=0, lt=1
    )
    rejection_level: Literal["token", "sequence", "geometric"] | None = Field(
        None, description="Leave out samples whose weight, of this level, is out of the range of rejection."
    )
    rejection_low: float = Field(0.5, description="Lower end of that range.", ge=0)
    rejection_high: float = Field(2.0, description="Upper end of that range.", gt=0)
    custom_tis_function_path: str | None = Field(
        None, description="Function that corrects the policy loss for the engine's log-probs, in place of these."
    )
    use_opsm: bool = Field(
        False, description="Off-policy sequence masking: leave out samples with a negative advantage that are far off."
    )
    opsm_delta: float = Field(1e-4, description="Mean log-ratio from which on a sample is far off, nats.", ge=0)
    use_unbiased_kl: bool = Field(
        False, description="Weigh the KL term by the ratio of the policy to the one that acted, which unbiases it."
    )
    use_kl_loss: bool = Field(False, description="Add a KL term to the reference model to the loss.")
    kl_loss_coef: float = Field(0.0, description="Coefficient of the KL term in the loss.", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field("k3", description="Estimator of the KL term.")
    entropy_coef: float = Field(0.0, description="Coefficient of the entropy bonus.", ge=0)
    use_opd: bool = Field(
        False, description="On-policy distillation: a teacher says the log-prob of each token of a response."
    )
    opd_type: Literal["sglang", "megatron"] = Field(
        "sglang", description="What computes the teacher's log-probs: engines of its own, or the trainers."
    )
    opd_kl_coef: float = Field(1.0, description="Coefficient of the reverse KL to the teacher.", ge=0)
    opd_teacher_load: str | None = Field(
        None, description="Hugging Face folder of the teacher; its tokens are those of --hf-checkpoint."
    )
    opd_teacher_num_gpus: int = Field(1, description="Devices of the teacher's engines in all.", ge=1)
    opd_teacher_num_gpus_per_engine: int = Field(
        1, description="Devices of one of them (its tensor parallel size).", ge=1
    )
    opd_teacher_server_args: dict[str, Any] = Field(
        default_factory=dict, description="SGLang ServerArgs fields of the teacher's engines, as JSON."
    )
    calculate_per_token_loss: bool = Field(
        True, description="Average the loss over all tokens; off: over samples of their token means."
    )
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = Field(
        "policy_loss",
        description="The loss of --mode rl; custom_loss is --custom-loss-function-path's. --mode sft has its own.",
    )
    custom_loss_function_path: str | None = Field(
        None, description="Function that computes the loss of a micro-batch from its logits (--loss-type custom_loss)."
    )
    use_rollout_logprobs: bool = Field(
        False, description="Take the engine's log-probs as the old policy's instead of computing them."
    )
    use_routing_replay: bool = Field(
        False,
        description="Mixtures of experts: in all optimizer steps of a rollout, send each token to the experts of the"
        " log-prob pass before the first (docs/models.md).",
    )
    use_rollout_routing_replay: bool = Field(
        False,
        description="Mixtures of experts: in log-prob pass and steps, send each token to the experts that the engine"
        " chose, the samples' rollout_routed_experts (docs/models.md).",
    )


class CriticGroup(Group):
    """Critic (--advantage-estimator ppo)"""

    critic_load: str | None = Field(
        None, description="Hugging Face folder that the critic starts with. Default: --hf-checkpoint, and values of 0."
    )
    critic_lr: float | None = Field(None, description="Learning rate of the critic. Default: --lr.", ge=0)
    critic_lr_warmup_iters: int | None = Field(
        None, description="Its warm-up, optimizer steps. Default: --lr-warmup-iters.", ge=0
    )
    critic_num_gpus: int | None = Field(
        None, description="Devices of the critic alone. Default: it shares the actor's.", ge=1
    )
    critic_tensor_model_parallel_size: int | None = Field(
        None, description="Tensor parallel size of the critic. Default: as the actor's, here and below.", ge=1
    )
    critic_pipeline_model_parallel_size: int | None = Field(
        None, description="Pipeline parallel size of the critic.", ge=1
    )
    critic_context_parallel_size: int | None = Field(None, description="Context parallel size of the critic.", ge=1)
    critic_expert_model_parallel_size: int | None = Field(None, description="Expert parallel size of the critic.", ge=1)
    num_critic_only_steps: int = Field(0, description="First rollouts in which the critic alone is trained.", ge=0)
    value_clip: float = Field(0.2, description="How far a value may move from the one before the step.", gt=0)


class PrmGroup(Group):
    """Process reward model (--advantage-estimator prime)"""

    prm_load: str | None = Field(
        None,
        description="Hugging Face folder that the reward model starts with, and is measured against."
        " Default: --hf-checkpoint.",
    )
    prm_lr: float | None = Field(
        None,
        description="Learning rate of the reward model, which learns to tell raw rewards above 0 from others."
        " Default: --lr.",
        ge=0,
    )
    prm_lr_warmup_iters: int | None = Field(
        None, description="Its warm-up, optimizer steps. Default: --lr-warmup-iters.", ge=0
    )
    prm_beta: float = Field(
        0.05, description="Reward of a nat by which it finds a token likelier than at its start.", gt=0
    )
    prm_process_coef: float = Field(1.0, description="Weight of the process rewards in the advantage.", ge=0)
    prm_outcome_coef: float = Field(1.0, description="Weight of the outcome in the advantage.", ge=0)
    prm_num_gpus: int | None = Field(
        None, description="Devices of the reward model alone. Default: it shares the actor's.", ge=1
    )
    prm_tensor_model_parallel_size: int | None = Field(
        None, description="Tensor parallel size of the reward model. Default: as the actor's, here and below.", ge=1
    )
    prm_pipeline_model_parallel_size: int | None = Field(
        None, description="Pipeline parallel size of the reward model.", ge=1
    )
    prm_context_parallel_size: int | None = Field(None, description="Context parallel size of the reward model.", ge=1)
    prm_expert_model_parallel_size: int | None = Field(
        None, description="Expert parallel size of the reward model.", ge=1
    )


class TrainGroup(Group):
    """Training"""

    global_batch_size: int | None = Field(None, description="Samples of one optimizer step.", ge=1)
    num_steps_per_rollout: int | None = Field(
        None, description="Optimizer steps of one rollout; gives --global-batch-size, and the reverse.", ge=1
    )
    micro_batch_size: int | None = Field(
        None, description="Samples of a micro-batch. Default: as many as --max-tokens-per-gpu holds.", ge=1
    )
    max_tokens_per_gpu: int = Field(8192, description="Tokens of a micro-batch, at most.", ge=1)
    use_dynamic_batch_size: bool = Field(
        True, description="Fill micro-batches up to --max-tokens-per-gpu; always so (for launch scripts of slime)."
    )
    balance_data: bool = Field(
        True, description="Share samples out by what they cost; always so (for launch scripts of slime)."
    )
    lr: float = Field(1e-6, description="Learning rate at its peak.", ge=0)
    min_lr: float = Field(0.0, description="Learning rate at the end of its decay.", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape of the decay.")
    lr_decay_iters: int | None = Field(
        None, description="Optimizer steps over which the rate decays. Default: the whole run.", ge=1
    )
    lr_warmup_iters: int = Field(
        0,
        description="Optimizer steps of linear warm-up, from --lr-warmup-init on. The first of them has that rate, the"
        " one after them --lr.",
        ge=0,
    )
    lr_warmup_init: float = Field(
        0.0,
        description="Learning rate of the first optimizer step of a warm-up. At 0, Megatron's and slime's default, that"
        " step changes no weights.",
        ge=0,
    )
    weight_decay: float = Field(0.0, description="Weight decay (decoupled).", ge=0)
    adam_beta1: float = Field(0.9, description="Adam's beta 1.", ge=0, lt=1)
    adam_beta2: float = Field(0.98, description="Adam's beta 2.", ge=0, lt=1)
    adam_eps: float = Field(1e-8, description="Adam's epsilon.", gt=0)
    clip_grad: float = Field(1.0, description="Largest norm of the gradient; 0 is no clipping.", ge=0)
    max_skipped_steps: int = Field(
        5,
        description="Optimizer steps skipped in a row, for a loss or gradient that is not finite, that end the run.",
        ge=1,
    )
    custom_advantage_function_path: str | None = Field(
        None, description="Function that sets advantages (and returns) of a rank's samples in the trainers."
    )
    rollout_data_postprocess_path: str | None = Field(
        None, description="Function that sees, and may change, a rank's train data right before the first step."
    )
    custom_megatron_init_path: str | None = Field(
        None, description="Function called in each trainer when Megatron's groups are there, before the model."
    )
    custom_megatron_before_log_prob_hook_path: str | None = Field(
        None, description="Function called in each trainer before log-probs are computed."
    )
    custom_megatron_before_train_step_hook_path: str | None = Field(
        None, description="Function called in each trainer before an optimizer step."
    )
    log_probs_chunk_size: int | None = Field(
        None,
        description="Logits made at a time: as many as so many tokens have. Without it about 32 MiB.",
        ge=1,
    )


class EvalGroup(Group):
    """Evaluation"""

    eval_interval: int | None = Field(None, description="Rollout steps between evaluations.", ge=1)
    eval_prompt_data: list[str] = Field(
        default_factory=list,
        description="Pairs of name and file: `--eval-prompt-data aime aime.jsonl`; what --prompt-data takes.",
    )
    eval_config: str | None = Field(
        None,
        description="YAML file of evaluation sets, each with its own number of samples, sampling and reward"
        " (eval.defaults, eval.datasets); in place of --eval-prompt-data.",
    )
    skip_eval_before_train: bool = Field(False, description="No evaluation before the first step.")
    eval_input_key: str | None = Field(None, description="As --input-key, for evaluation.")
    eval_label_key: str | None = Field(None, description="As --label-key, for evaluation.")
    n_samples_per_eval_prompt: int = Field(1, description="Samples of each evaluation prompt.", ge=1)
    eval_temperature: float | None = Field(
        None, description="Temperature of evaluation; 0 is greedy. Default: --rollout-temperature.", ge=0
    )
    eval_top_p: float | None = Field(None, description="As --rollout-top-p, for evaluation.", gt=0, le=1)
    eval_top_k: int | None = Field(None, description="As --rollout-top-k, for evaluation.", ge=-1)
    eval_max_response_len: int | None = Field(None, description="As --rollout-max-response-len.", ge=1)

    @property
    def has_sets(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.eval_prompt_data or self.eval_config)


class WeightsGroup(Group):
    """Weight push"""

    update_weight_mode: Literal["full", "delta"] = Field(
        "full", description="What travels: all weights, or what has changed since the last push (transport disk)."
    )
    update_weight_transport: Literal["auto", "broadcast", "ipc", "disk"] = Field(
        "auto",
        description="How weights reach the engines; auto is ipc when colocated, else broadcast. disk: by files in a"
        " folder that trainers' and engines' nodes see (docs/weight-push-disk.md).",
    )
    update_weight_disk_dir: str | None = Field(
        None, description="That folder, for this run alone. Default: weights in the run's folder."
    )
    update_weight_disk_keep_files: bool = Field(
        False, description="Keep the files of all versions; else those of the last one, until the run ends."
    )
    update_weight_local_checkpoint_dir: str | None = Field(
        None,
        description="Folder for a copy of the weights on each host of engines, which they load; needed for delta."
        " Without it they load from --update-weight-disk-dir.",
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = Field(
        "xor", description="How a delta says what changed: xor of all bits, or places and new values."
    )
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "sha256", "adler32"] = Field(
        "xxh3-128", description="Checksum of what is pushed by files, and of each tensor that a delta has changed."
    )
    custom_update_weight_post_write_path: str | None = Field(
        None, description="Function called in every trainer when a version's files are there (docs/hooks.md)."
    )
    update_weight_buffer_size: int = Field(
        512 * 1024**2, description="Bytes of one bucket of a weight push, at most.", ge=1024
    )
    pause_generation_mode: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="What a weight push does to requests that are running; in_place turns the prefix cache off.",
    )
    verify_weights: Literal["first", "always", "never"] = Field(
        "first", description="Which pushes are verified by checksums and by log-probs."
    )
    verify_tolerance: float | None = Field(
        None,
        description="Mean |log-prob difference| a verified push may show. Default: 1e-4 in fp32, else 0.1.",
        gt=0,
    )
    update_weight_timeout_s: float = Field(600.0, description="Time limit of one weight push, seconds.", gt=0)


class CheckpointGroup(Group):
    """Checkpoints"""

    save_interval: int | None = Field(
        None, description="Rollout steps between checkpoints; without it only the last step is saved.", ge=1
    )
    no_save: bool = Field(False, description="Write no checkpoints at all.")
    async_save: bool = Field(
        False,
        description="Write a checkpoint's files while the run goes on: a process of each trainer writes a copy.",
    )
    verify_checkpoints: bool = Field(
        False,
        description="Keep hashes of weights, optimizer, RNG and data cursor with each checkpoint, and refuse to go on"
        " from one where what was loaded has others (seconds for each GB).",
    )
    keep_checkpoints: int | None = Field(
        None, description="Keep this many of the newest checkpoints and delete older ones. Default: all.", ge=1
    )
    keep_best: str | None = Field(
        None,
        description="With --keep-checkpoints: keep also the one with the highest value of this metric"
        " (eval/<set>/accuracy).",
    )
    save_hf: str | None = Field(
        None,
        description="Save the weights as a Hugging Face folder here at the end ({rollout_id} is filled in).",
    )


class RejectSamplingGroup(Group):
    """Reject sampling"""

    reject_sampling_output: str | None = Field(
        None, description="File of the accepted samples. Default: accepted.jsonl in the run folder."
    )
    reject_sampling_threshold: float = Field(1.0, description="Samples with at least this reward are accepted.")
    reject_sampling_per_prompt: int = Field(
        1, description="Accepted samples kept for one prompt, the best first.", ge=1
    )
    no_trainer: bool = Field(False, description="reject-sampling without trainers: the engines load the checkpoint.")


GROUPS: dict[str, type[Group]] = {
    "run": RunGroup,
    "cluster": ClusterGroup,
    "model": ModelGroup,
    "data": DataGroup,
    "rollout": RolloutGroup,
    "reward": RewardGroup,
    "algorithm": AlgorithmGroup,
    "critic": CriticGroup,
    "prm": PrmGroup,
    "train": TrainGroup,
    "eval": EvalGroup,
    "weights": WeightsGroup,
    "checkpoint": CheckpointGroup,
    "reject_sampling": RejectSamplingGroup,
}
