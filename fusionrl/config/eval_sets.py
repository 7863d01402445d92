"""Evaluation sets: by flags (--eval-prompt-data), or by a file with settings of its own for each (--eval-config).

docs/guides/evaluation.md shows the file, which has slime's form; its keys are the fields of `EvalSet`.
"""

import functools
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from fusionrl.config.config import Config
from fusionrl.config.scopes import Group

# Settings that have the value of the flag of their name, or, without --eval-…, that of another flag.
_AS_THE_FLAGS = (
    *("metadata_key", "tool_key", "multimodal_folder", "image_max_pixels", "image_min_pixels"),
    *("n_samples_per_eval_prompt", "rm_type", "custom_rm_path", "custom_generate_function_path"),
)
_UNLESS_GIVEN = {
    "": ("reward_key",),
    "rollout_": ("temperature", "top_p", "top_k", "max_response_len"),
}
_REWARD = ("rm_type", "custom_rm_path")  # alternatives: setting either replaces both


class EvalSet(Group):
    """One evaluation set: where its prompts are, how they are sampled and how they are scored."""

    name: str
    path: str
    input_key: str
    label_key: str | None = None
    metadata_key: str
    tool_key: str | None = None
    multimodal_keys: dict[str, Any] = Field(default_factory=dict)
    multimodal_folder: str | None = None
    image_max_pixels: int | None = Field(None, ge=1)
    image_min_pixels: int | None = Field(None, ge=1)
    n_samples_per_eval_prompt: int = Field(ge=1)
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=-1)
    max_response_len: int | None = Field(ge=1)
    min_new_tokens: int = Field(ge=0)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    stop: list[str]
    stop_token_ids: list[int]
    rm_type: str | None = None
    custom_rm_path: str | None = None
    reward_key: str | None = None
    custom_generate_function_path: str | None = None
    adapter: str | None = None
    metadata_overrides: dict[str, Any] = Field(default_factory=dict)


def eval_sets(args: Namespace) -> list[EvalSet]:
    """The sets of the flags `args`, with every setting filled in. ValueError: a line for each mistake in the file."""
    flags = _from_flags(args)
    if args.eval_config is None:
        pairs = args.eval_prompt_data
        return [EvalSet(name=n, path=p, **flags) for n, p in zip(pairs[::2], pairs[1::2], strict=True)]
    where = f"--eval-config {args.eval_config}"
    defaults, entries = _read(args.eval_config, has_reader=args.eval_function_path is not None)
    sets: list[EvalSet] = []
    errors: dict[str, None] = {}  # a mistake in the defaults is one, however many sets there are
    for place, entry in entries:
        values = _over(_over(flags, defaults), entry)
        try:
            sets.append(EvalSet(**values))
        except ValidationError as error:
            for detail in error.errors():
                key = ".".join(map(str, detail["loc"]))
                layer = "defaults" if detail["loc"][0] in defaults and detail["loc"][0] not in entry else place
                message = detail["msg"]
                if detail["type"] == "extra_forbidden":
                    message = f"unknown key; known are {', '.join(EvalSet.model_fields)}"
                errors[f"{where}: {layer}.{key}: {message}"] = None
        if all(entry.get(key) for key in _REWARD):
            errors[f"{where}: {place}: rm_type and custom_rm_path exclude each other; leave one out"] = None
    if errors:
        raise ValueError("\n".join(errors))
    return sets


def readable_sets(config: Config) -> list[EvalSet]:
    """Return the sets of a run; none where they cannot be read, which `checks.rollout` reports."""
    try:
        return eval_sets(config.to_args()) if len(config.eval.eval_prompt_data) % 2 == 0 else []
    except ValueError:
        return []


def pixels_of_sets(config: Config) -> list[tuple[int | None, int | None]]:
    """Return (--image-min-pixels, --image-max-pixels) of the prompt data and of each evaluation set."""
    sets = [(one.image_min_pixels, one.image_max_pixels) for one in readable_sets(config)]
    return [(config.data.image_min_pixels, config.data.image_max_pixels), *sets]


def sees_images(config: Config) -> bool:
    """Return whether samples may have images, so that engines and trainers have the model's vision tower."""
    if config.data.multimodal_keys or config.eval.eval_config is None:
        return bool(config.data.multimodal_keys)
    return any(one.multimodal_keys for one in readable_sets(config))


def _from_flags(args: Namespace) -> dict[str, object]:
    values = {name: getattr(args, name) for name in _AS_THE_FLAGS}
    for prefix, names in _UNLESS_GIVEN.items():
        for name in names:
            own = getattr(args, f"eval_{name}")
            values[name] = getattr(args, prefix + name) if own is None else own
    return values | {
        "input_key": args.eval_input_key or args.input_key,
        "label_key": args.eval_label_key or args.label_key,
        "multimodal_keys": args.multimodal_keys or {},
        "min_new_tokens": args.rollout_min_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
    }


def _over(low: Mapping[str, object], high: Mapping[str, object]) -> dict[str, object]:
    inherited = {key: value for key, value in low.items() if not (key in _REWARD and any(k in high for k in _REWARD))}
    return {**inherited, **high}


@functools.cache  # once a process: an edit of the file does not change the evaluations of a running run
def _read(path: str, has_reader: bool) -> tuple[dict[str, object], list[tuple[str, dict[str, object]]]]:
    """(defaults, [(place in the file, set)]) of a file; a user's evaluation function may read further keys of it."""
    import yaml

    flag = f"--eval-config {path}"
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{flag}: not a readable YAML file ({' '.join(str(error).split())})") from error
    top = content.get("eval", content) if isinstance(content, dict) else None
    if not isinstance(top, dict) or not top.get("datasets"):
        raise ValueError(f"{flag}: it names no sets; give eval.datasets, each with name and path")
    for key in [*top, *(content if top is not content else ())]:
        if key not in ("eval", "defaults", "datasets") and not has_reader:
            raise ValueError(f"{flag}: {key}: unknown key; known are eval.defaults and eval.datasets")
    defaults, datasets = top.get("defaults") or {}, top["datasets"]
    if isinstance(datasets, dict):
        places = [f"datasets.{name}" for name in datasets]
        datasets = [{"name": name, **value} if isinstance(value, dict) else value for name, value in datasets.items()]
    elif isinstance(datasets, list):
        places = [f"datasets[{i}]" for i in range(len(datasets))]
    else:
        raise ValueError(f"{flag}: eval.datasets: a list of sets or a mapping of names to sets is wanted")
    for place, value in [("defaults", defaults), *zip(places, datasets, strict=True)]:
        if not isinstance(value, dict):
            raise ValueError(f"{flag}: {place}: a mapping of keys to values is wanted, not {value!r}")
    return defaults, list(zip(places, datasets, strict=True))
