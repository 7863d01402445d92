"""What engines read in place of a folder's own config.json.

SGLang reads some fields by names that transformers does not write. Of a multimodal model engines serve the text part.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from fusionrl.models import families
from fusionrl.models.quantization import is_mxfp4
from fusionrl.models.shape import read_hf_config, read_text_config


def engine_fields(folder: str | Path) -> dict[str, object]:
    """Return what an engine must read otherwise than config.json has it: nothing of a family that is not known here.

    A folder that transformers 5 saved lacks fields that its own classes do not read, and has those of its rotary
    embeddings at another place; next to them it may have a default that SGLang alone reads.
    """
    try:
        raw = read_text_config(folder, "--hf-checkpoint")
        family = families.get_family(raw.get("model_type", ""))
    except ValueError:
        return {}
    fields = {} if family.engine is None else family.engine(family.filled(raw))
    return {name: value for name, value in fields.items() if raw.get(name) != value}


def pushed_arguments(folder: str | Path, overrides: object) -> dict[str, object]:
    """Return fields of `ServerArgs` for an engine that gets all of its weights from trainers.

    Where the folder has them in MXFP4, trainers push what that means, and the engine does not read the files.
    `overrides`: the user's, as JSON.
    """
    try:
        has_other_form = is_mxfp4(read_hf_config(folder, "--hf-checkpoint"))
    except ValueError:
        has_other_form = False
    if not has_other_form:
        return {}
    plain = {"quantization_config": None} | json.loads(str(overrides or "{}"))
    return {"load_format": "dummy", "json_model_override_args": json.dumps(plain)}


def text_view(folder: str, place: Path, *, is_filled: bool = False) -> str:
    """Return the folder from which an engine serves the text model of `folder`: that itself, or `place`.

    At `place` is then config.json of the text model alone, and a link to each other file. SGLang knows the names that
    tensors have there (`engines/model_checks.py`).

    is_filled: config.json has `engine_fields`, too, for an engine with a draft model of its own: that would get what
    --json-model-override-args brings. So it has them where they change model_type, which SGLang reads there alone.
    """
    if not Path(folder, "config.json").is_file():  # a name of the Hub's
        return folder
    raw, text = read_hf_config(folder, "model"), read_text_config(folder, "model")
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
