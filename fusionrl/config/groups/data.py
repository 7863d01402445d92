"""Prompts to train and to evaluate on: DataGroup, EvalGroup."""

from typing import Literal

from pydantic import field_serializer, field_validator

from fusionrl.config import scopes
from fusionrl.config.groups.base import Group, JsonObject, acting, always, of_engines, of_eval_engines, of_prompts
from fusionrl.config.run_parts import DEFAULT_SOURCE

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
    eval_num_gpus: int = acting(*map(scopes.needed, (scopes.EVALUATES, scopes.HAS_SETS, scopes.IS_DUE)))(
        0, "Extra devices for engines that only evaluate. 0: the policy's engines do, and training waits.", ge=0
    )

    @property
    def has_sets(self) -> bool:
        return bool(self.eval_prompt_data or self.eval_config)
