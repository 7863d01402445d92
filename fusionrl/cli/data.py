"""`fusionrl data check FILE… [flags]`: read prompt data, and list all that is wrong with it."""

import itertools
import math
from collections.abc import Sequence

from fusionrl.base.imports import quiet
from fusionrl.base.wording import counted
from fusionrl.checks.data import prompt_columns
from fusionrl.checks.hub import resolve_names
from fusionrl.checks.images import image_errors
from fusionrl.checks.lengths import conversation_limit, file_length_errors
from fusionrl.cli import EXIT_USER, refuse
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import sees_images
from fusionrl.config.parser import CommandLineError, read_args
from fusionrl.data.findings import Finding
from fusionrl.models.shape import ModelShape, read_model_shape
from fusionrl.rewards.registry import LabelCheck

_USAGE = """usage: fusionrl data check FILE… [flags]

FILE is what --prompt-data takes; the flags are those of `fusionrl train`, of which these matter: --mode sft,
--input-key, --label-key, --metadata-key, --tool-key, --apply-chat-template, --apply-chat-template-kwargs; to read
labels, --rm-type; and, to count tokens, --hf-checkpoint, --rollout-max-prompt-len and --rollout-max-response-len.
Exit code 2: something is wrong."""


def run(argv: Sequence[str]) -> int:
    """Check the files; returns the exit code: 2 if there is a row that cannot be trained on."""
    asks_for_help = bool({"-h", "--help"} & set(argv))
    if argv[:1] != ["check"] or asks_for_help:
        print(_USAGE)
        return 0 if asks_for_help else EXIT_USER
    try:
        return _check(argv[1:])
    except CommandLineError as error:
        return refuse(error.errors)


def _shape(config: Config) -> ModelShape | None:
    """Return the shape of the model; None without one, as where the folder has a tokenizer alone."""
    folder = config.model.hf_checkpoint
    try:
        return None if folder is None else read_model_shape(folder, sees=sees_images(config))
    except ValueError:
        return None


def _check(argv: Sequence[str]) -> int:
    """`fusionrl data check FILE… [flags]`: print one line a cause, and a summary; 2 if a row cannot be trained on."""
    from fusionrl.checks.data import DataCheck

    files = list(itertools.takewhile(lambda token: not token.startswith("-"), argv))
    config, errors = read_args(argv[len(files) :], "fusionrl data check")
    config, not_had = resolve_names(config, with_weights=False)
    errors += not_had
    files = files or config.data.prompt_data or []
    data, folder, is_sft = config.data, config.model.hf_checkpoint, config.run.mode == "sft"
    if not files:
        errors.append(f"no file to check\n\n{_USAGE}")
    if data.rollout_max_prompt_len is not None and folder is None:
        errors.append(f"--rollout-max-prompt-len {data.rollout_max_prompt_len}: counting needs --hf-checkpoint")
    tokenizer = None
    if folder is not None and not errors:
        from fusionrl.data.tokenizer import load_tokenizer

        try:
            with quiet():
                tokenizer = load_tokenizer(folder)
        except (OSError, ValueError) as error:
            errors.append(f"--hf-checkpoint {folder}: its tokenizer cannot be read ({error})")
    shape = _shape(config)
    errors += image_errors(config, shape)
    if errors:
        return refuse(errors)
    vocab_size = shape.vocab_size if shape is not None else None
    labels = LabelCheck.of_run(config, budget_s=math.inf)
    check = DataCheck(prompt_columns(config), tokenizer, is_sft, config.data.loss_mask_type, vocab_size, labels)
    if is_sft and shape is not None and (limit := conversation_limit(config, shape)) is not None:
        check.limit = limit.num_tokens, Finding(f"it has more tokens than {limit.name}", hint=limit.cure)
    num_problems = num_warnings = 0
    for file in files:
        with quiet():  # transformers warns of each long text in words of its own
            problems, warnings = check.problems(file)
        if shape is not None and not is_sft:
            problems += file_length_errors(config, shape, file)
        for text in (*problems, *(f"warning: {warning}" for warning in warnings)):
            print(text)
        num_problems += len(problems)
        num_warnings += len(warnings)
    verdict = f"{num_problems or 'no'} problem{'s' * (num_problems != 1)}"
    verdict += f", {counted(num_warnings, 'warning')}" if num_warnings else ""
    print(f"{check.summary()}; {verdict}")
    return EXIT_USER if num_problems else 0
