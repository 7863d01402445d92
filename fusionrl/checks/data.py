"""Checks of the prompt data, by reading it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.base.log_suppression import quiet
from fusionrl.checks.images import image_text, usable_columns
from fusionrl.checks.long_rows import count_tokens, fewest_bytes, light_rows
from fusionrl.checks.rewards import run_label_check
from fusionrl.config.config import Config
from fusionrl.config.run_parts import reads_prompts
from fusionrl.data.findings import Findings
from fusionrl.data.prompts import PromptColumns, check_file, load_prompts, template_probe
from fusionrl.data.row_checks import RowChecker
from fusionrl.data.rows import Row, parse_sets, read_rows
from fusionrl.data.supervised import holds_tokens
from fusionrl.data.tokenizer_files import TokenizerFiles, read_tokenizer_files
from fusionrl.models.scorers import has_chat_template
from fusionrl.rewards.labels import LabelCheck

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEW_ROWS = 1_000  # prompts that are tokenized within a second


def check_prompts(config: Config, errors: list[str], warnings: list[str], vocab_size: int | None = None) -> int:
    """Read the prompt data, and return its number of prompts, 0 where it is not known; mistakes go to `errors`."""
    data, count = config.data, 0
    if data.prompt_data is not None and config.run.mode != "eval":
        count = _check_prompt_data(config, errors, warnings, vocab_size)
    if data.apply_chat_template and _has_template(config) is False:
        folder = config.model.hf_checkpoint
        errors.append(f"--apply-chat-template: the tokenizer of --hf-checkpoint {folder} has no chat template")
    return count


def prompt_columns(config: Config) -> PromptColumns:
    """Return what the flags say about the columns of the prompt data."""
    args = config.to_args()
    return PromptColumns.of(args, reads_prompts(args.rollout_function_path, args.custom_generate_function_path))


def tokenizer_files(config: Config) -> TokenizerFiles | None:
    """Return the settings in the tokenizer's files; None without such a folder."""
    folder = config.model.hf_checkpoint
    return read_tokenizer_files(folder) if folder is not None and Path(folder).is_dir() else None


def check_set(
    config: Config,
    files: TokenizerFiles | None,
    spec: str,
    columns: PromptColumns,
    flags: tuple[str, str],
    vocab_size: int | None,
    ask_reward: LabelCheck | None,
) -> Findings:
    """Read one set and check its rows, also by the chat template. `flags`: those of the set and of its column."""
    (flag, key_flag), is_sft, probe = flags, config.run.mode == "sft", None

    def load() -> PreTrainedTokenizerBase:
        from fusionrl.data.tokenizer import load_tokenizer

        return load_tokenizer(str(config.model.hf_checkpoint))

    if files is not None:
        probe = template_probe(files, columns, load, config.data.loss_mask_type if is_sft else None)
    columns = usable_columns(columns)
    placeholder = image_text(columns.images, files)
    checker = RowChecker(
        columns,
        key_flag,
        is_sft=is_sft,
        special_tokens=files.special_tokens if files else (),
        probe=probe,
        vocab_size=vocab_size,
        ask_reward=ask_reward,
        placeholder=placeholder,
    )
    return check_file(spec, flag, checker)


def _check_prompt_data(config: Config, errors: list[str], warnings: list[str], vocab_size: int | None) -> int:
    """Return the number of prompts of all sets, which --num-epoch counts; 0 where it is not known."""
    data, is_sft = config.data, config.run.mode == "sft"
    specs, weights, columns = data.prompt_data or [], data.prompt_data_weights, usable_columns(prompt_columns(config))
    flag = f"--prompt-data-weights {' '.join(map(str, weights))}"
    if weights and len(weights) != len(specs):
        errors.append(f"{flag}: {len(weights)} weights for {len(specs)} sets of --prompt-data; give one for each")
    if any(weight <= 0 for weight in weights):
        errors.append(f"{flag}: each must be over 0; leave the other sets out")
    try:
        parse_sets(specs)
    except ValueError as error:
        errors.append(str(error))
        return 0
    total, num_errors, files = 0, len(errors), tokenizer_files(config)
    flags = ("--prompt-data", "--input-key")
    for spec in specs:
        check = check_set(config, files, spec, columns, flags, vocab_size, run_label_check(config))
        errors += check.errors
        warnings += check.warnings
        total += check.num_rows
        if is_sft and not check.errors and _has_template(config) is False:
            first = next(read_rows(spec))[1]
            if isinstance(first.get(data.input_key), list) and not holds_tokens(first):
                folder = config.model.hf_checkpoint
                errors.append(f"--mode sft: the tokenizer of --hf-checkpoint {folder} has no chat template")
    if len(errors) > num_errors:
        return 0  # how many rows of a bad set are prompts is nothing to count epochs by
    is_filtered = data.rollout_max_prompt_len is not None and not is_sft
    if is_filtered and _has_template(config) is not None:
        if config.run.num_rollout is None or total <= FEW_ROWS:
            return _count_prompts(config, specs, columns, errors)
        errors += _without_prompts(config, specs, columns)
    return total


def _count_prompts(config: Config, specs: list[str], columns: PromptColumns, errors: list[str]) -> int:
    """Return the number of prompts that are not too long: where epochs are counted by it, or the rows are few."""
    from fusionrl.data.tokenizer import load_tokenizer

    try:
        with quiet():
            tokenizer = load_tokenizer(str(config.model.hf_checkpoint))
            return sum(len(load_prompts(spec, tokenizer, columns).samples) for spec in specs)
    except (ValueError, OSError) as error:
        errors.append(str(error))
        return 0


def _without_prompts(config: Config, specs: list[str], columns: PromptColumns) -> list[str]:
    """Return a message for each set of which the limit of prompt tokens leaves nothing.

    Rows are tokenized until one fits, those with the fewest bytes first: mostly one row.
    """
    from fusionrl.data.tokenizer import load_tokenizer

    with quiet():
        tokenizer = load_tokenizer(str(config.model.hf_checkpoint))

    def fits(row: Row) -> bool:
        try:
            return count_tokens(row, tokenizer, columns) <= (columns.max_prompt_len or 0)
        except ValueError:  # what cannot be rendered here is another check's
            return True

    errors, limit = [], f"--rollout-max-prompt-len {columns.max_prompt_len}"
    for spec in specs:
        shortest = fewest_bytes(light_rows(spec, columns), (columns.input_key, columns.tool_key))
        # The fewest bytes may not be the fewest tokens: all rows are asked before a run is refused.
        if not any(map(fits, itertools.chain(shortest, (row for _, row in light_rows(spec, columns))))):
            errors.append(f"--prompt-data {spec}: no prompt is left: the shortest are over {limit}")
    return errors


def _has_template(config: Config) -> bool | None:
    folder = config.model.hf_checkpoint
    return has_chat_template(folder) if folder is not None and Path(folder).is_dir() else None
