"""Models that score what the policy samples, a reward model and a teacher: what their Hugging Face folders say."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionrl.models.engine_config import engine_fields
from fusionrl.models.shape import read_hf_config

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
    """Facts about a model that only reads.

    num_labels     numbers that a classifier gives for a text
    max_positions  tokens that it reads, at most; None: a RoPE scaling decides
    pad_token_id   token that transformers looks past for the last one of a text
    """

    architecture: str
    num_labels: int
    vocab_size: int
    num_attention_heads: int
    max_positions: int | None
    pad_token_id: int | None


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
