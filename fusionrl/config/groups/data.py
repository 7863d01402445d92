"""Prompts to train and to evaluate on: DataGroup, EvalGroup."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_serializer, field_validator

from fusionrl.config.groups.base import Group


class DataGroup(Group):
    """Data"""

    prompt_data: list[str] | None = Field(
        None,
        description="Prompts (rl, reject-sampling) or conversations (sft): one or several sets"
        " [NAME=]PATH[:SPLIT][@[START:STOP]], each a .jsonl, .json or .parquet file, a folder of such files or of"
        " datasets.save_to_disk, or a data set of the Hub (openai/gsm8k/main:train). See docs/guides/data.md.",
    )
    prompt_data_weights: list[float] = Field(
        default_factory=list,
        description="Sampling weights of the prompt sets. Default: in proportion to their sizes.",
    )
    input_key: str = Field("input", description="Column of the prompt (text, or a list of messages).")
    label_key: str | None = Field(None, description="Column of the label handed to the reward.")
    metadata_key: str = Field("metadata", description="Column of a JSON object that hooks get unchanged.")
    tool_key: str | None = Field(None, description="Column of tool definitions handed to the chat template.")
    apply_chat_template: bool = Field(False, description="Render prompts with the tokenizer's chat template.")
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
    rollout_shuffle: bool = Field(False, description="Reshuffle the prompts in each epoch.")
    rollout_seed: int = Field(42, description="Seed of the shuffle and of sampling.", ge=0)
    rollout_max_prompt_len: int | None = Field(
        None, description="Leave out, and count, prompts with more tokens.", ge=1
    )
    data_source_path: str = Field(
        "fusionrl.buffer.data_source.RolloutDataSource",
        description="Import path of the data source's class; some need no --prompt-data.",
    )
    buffer_filter_path: str | None = Field(
        None, description="Function that chooses which returned groups are used first."
    )

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

    eval_interval: int | None = Field(None, description="Rollout steps between evaluations.", ge=1)
    eval_prompt_data: list[str] = Field(
        default_factory=list,
        description="Pairs of name and file, `--eval-prompt-data aime aime.jsonl`; files as for --prompt-data.",
    )
    eval_config: str | None = Field(
        None,
        description="YAML file of evaluation sets, each with its own number of samples, sampling and reward"
        " (eval.defaults, eval.datasets); instead of --eval-prompt-data.",
    )
    skip_eval_before_train: bool = Field(False, description="Skip the evaluation before the first step.")
    eval_input_key: str | None = Field(None, description="As --input-key, for evaluation.")
    eval_label_key: str | None = Field(None, description="As --label-key, for evaluation.")
    n_samples_per_eval_prompt: int = Field(1, description="Samples of each evaluation prompt.", ge=1)
    eval_temperature: float | None = Field(
        None, description="Temperature of evaluation; 0 is greedy. Default: --rollout-temperature.", ge=0
    )
    eval_top_p: float | None = Field(None, description="As --rollout-top-p, for evaluation.", gt=0, le=1)
    eval_top_k: int | None = Field(None, description="As --rollout-top-k, for evaluation.", ge=-1)
    eval_max_response_len: int | None = Field(None, description="As --rollout-max-response-len.", ge=1)
    eval_num_gpus: int = Field(
        0,
        description="Extra devices for engines that only evaluate, while training and generation continue. 0: the"
        " policy's engines evaluate, and training waits.",
        ge=0,
    )

    @property
    def has_sets(self) -> bool:
        """Return whether there is an evaluation set."""
        return bool(self.eval_prompt_data or self.eval_config)
