"""What engines read in place of a folder's own config.json, and what they score with: reward models and teachers.

SGLang reads some fields by names that transformers does not write. Of a multimodal model engines serve the text part.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionrl.models import families
from fusionrl.models.hf_folder import form_of, places, stored_tensors
from fusionrl.models.quantization import is_mxfp4
from fusionrl.models.shape import read_hf_config, read_text_config


def engine_fields(folder: str | Path, *, sees: bool = False) -> dict[str, object]:
    """Return what an engine must read otherwise than config.json has it: nothing of a family that is not known here.

    `sees`: it serves a multimodal model as a whole, and reads these of its text_config.

    A folder that transformers 5 saved lacks fields that its own classes do not read, and has those of its rotary
    embeddings at another place; next to them it may have a default that SGLang alone reads.
    """
    try:
        raw = read_text_config(folder, "--hf-checkpoint")
        family = families.get_family(raw.get("model_type", ""))
    except ValueError:
        return {}
    fields = {} if family.engine is None else family.engine(family.filled(raw))
    others = {name: value for name, value in fields.items() if raw.get(name) != value}
    if not sees:
        return others
    others.pop("architectures", None)
    return {"text_config": others} if others else {}


def pushed_arguments(folder: str | Path, overrides: object) -> dict[str, object]:
    """Return fields of `ServerArgs` for an engine that gets all of its weights from trainers.

    Where the folder has them in MXFP4, or experts of Qwen3-VL-MoE as transformers 5 makes them, trainers push what that
    means, and the engine does not read the files. `overrides`: the user's, as JSON.
    """
    try:
        text = read_text_config(folder, "--hf-checkpoint")
        if not is_mxfp4(text):
            if (form := form_of(text)) is None or not form.may_turn:
                return {}
            # SGLang cannot read experts of a layer in one tensor with outputs before inputs.
            stored, sizes = stored_tensors(folder), (text["hidden_size"], text["moe_intermediate_size"])
            down = (place for name, place in places(stored, text).items() if name.endswith(".down_proj.weight"))
            first = next((place for place in down if place.may_turn), None)
            is_other = first is not None and not first.turned(sizes, stored[first.name].sizes).is_turned
            return {"load_format": "dummy"} if is_other else {}
    except (OSError, KeyError, ValueError):
        return {}
    plain = {"quantization_config": None} | json.loads(str(overrides or "{}"))
    return {"load_format": "dummy", "json_model_override_args": json.dumps(plain)}


def text_view(folder: str, place: Path, *, is_filled: bool = False) -> str:
    """Return the folder from which an engine serves the text model of `folder`: that itself, or `place`.

    At `place` is then config.json of the text model alone, and a link to each other file. SGLang knows the names that
    tensors have there (`engines/server_patches.py`). A model of which SGLang has no class of the text part is served
    whole.

    is_filled: config.json has `engine_fields`, too, for an engine with a draft model of its own: that would get what
    --json-model-override-args brings. So it has them where they change model_type, which SGLang reads there alone.
    """
    if not Path(folder, "config.json").is_file():  # a name of the Hub's
        return folder
    raw, text = read_hf_config(folder, "model"), read_text_config(folder, "model")
    form = form_of(text)
    if text != raw and (form is None or form.architecture is None):
        return folder
    fields = engine_fields(folder)
    fields = fields if is_filled or "model_type" in fields else {}
    if text == raw and not fields:
        return folder
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for entry in os.scandir(folder):
        if entry.is_file() and entry.name != "config.json":
            (place / entry.name).symlink_to(os.path.abspath(entry.path))
    (place / "config.json").write_text(json.dumps({**text, **fields}, indent=2) + "\n", encoding="utf-8")
    return str(place)


# Sequence classifiers that SGLang serves by their last token's score, as transformers computes it.
REWARD_MODELS = (
    "Gemma2ForSequenceClassification",
    "LlamaForSequenceClassification",
    "Qwen2ForRewardModel",
    "Qwen2ForSequenceClassification",
    "Qwen3ForRewardModel",
    "Qwen3ForSequenceClassification",
)


@dataclass(frozen=True)
class ScorerModel:
    """Facts about a model that only reads."""

    architecture: str
    num_labels: int  # numbers that a classifier gives for a text
    vocab_size: int
    num_attention_heads: int
    max_positions: int | None  # tokens that it reads, at most; None: a RoPE scaling decides
    pad_token_id: int | None  # token that transformers looks past for the last one of a text


@functools.cache
def read_scorer(folder: str, flag: str) -> ScorerModel:
    """The model of `folder`."""
    raw = read_hf_config(folder, flag)
    text = raw.get("text_config") or raw  # of a model that sees pictures as well
    architecture = str((raw.get("architectures") or [""])[0])
    try:
        scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
        scaled = scaling.get("rope_type", scaling.get("type", "default")) != "default"
        positions = None if scaled else int(text["max_position_embeddings"])
        served: Mapping[str, Any] = engine_fields(folder)  # fewer positions, with sparse attention
        # transformers writes labels down where they are not two; the RewardModels have one by their code.
        labels = raw.get("id2label") or range(raw.get("num_labels") or 2)
        return ScorerModel(
            architecture=architecture,
            num_labels=1 if architecture.endswith("ForRewardModel") else len(labels),
            vocab_size=int(text["vocab_size"]),
            num_attention_heads=int(text["num_attention_heads"]),
            max_positions=served.get("max_position_embeddings", positions),
            pad_token_id=text.get("pad_token_id"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{flag} {folder}: config.json lacks or garbles a size ({error!r})") from error


@functools.cache
def same_tokens(first: str, second: str) -> bool:
    """Return whether a token id means the same text in the tokenizers of two folders.

    Read from tokenizer.json, which costs tenths of a second; a tokenizer that is kept otherwise is another one unless
    its file is the same byte by byte.
    """
    if Path(first).resolve() == Path(second).resolve():
        return True
    tables = [_token_table(Path(folder, "tokenizer.json")) for folder in (first, second)]
    if None not in tables:
        return tables[0] == tables[1]
    files = [Path(folder, "tokenizer.model") for folder in (first, second)]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def _token_table(path: Path) -> dict[int, str] | None:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        vocab = raw["model"]["vocab"]
        pairs = vocab.items() if isinstance(vocab, Mapping) else [(piece, i) for i, (piece, _) in enumerate(vocab)]
        added: list[dict[str, Any]] = raw.get("added_tokens") or []
        return {int(i): str(piece) for piece, i in pairs} | {int(token["id"]): token["content"] for token in added}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # no such file, or one of another form


def has_chat_template(folder: str | Path) -> bool | None:
    """Return whether the tokenizer of `folder` has a chat template; None where that is not known."""
    folder = Path(folder)
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except FileNotFoundError:
        return False
    except (ValueError, AttributeError):
        return None  # the tokenizer's own loading says what is wrong with the file
