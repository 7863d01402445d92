"""What engines read in place of a folder's own config.json.

SGLang reads some fields by names that transformers does not write. Of a multimodal model engines serve the text part.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from fusionrl.models import families
from fusionrl.models.published import form_of, places
from fusionrl.models.quantization import is_mxfp4
from fusionrl.models.shape import read_hf_config, read_text_config
from fusionrl.models.weight_files import stored_tensors


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
    if _has_other_experts(folder):
        return {"load_format": "dummy"}
    try:
        has_other_form = is_mxfp4(read_hf_config(folder, "--hf-checkpoint"))
    except ValueError:
        has_other_form = False
    if not has_other_form:
        return {}
    plain = {"quantization_config": None} | json.loads(str(overrides or "{}"))
    return {"load_format": "dummy", "json_model_override_args": json.dumps(plain)}


def _has_other_experts(folder: str | Path) -> bool:
    """Return whether the experts of a layer are in one tensor with outputs before inputs, which SGLang cannot read."""
    try:
        text = read_text_config(folder, "--hf-checkpoint")
        form = form_of(text)
        if form is None or not form.may_turn:
            return False
        stored = stored_tensors(folder)
        sizes = text["hidden_size"], text["moe_intermediate_size"]
        down = (place for name, place in places(stored, text).items() if name.endswith(".down_proj.weight"))
        first = next((place for place in down if place.may_turn), None)
        return first is not None and not first.turned(sizes, stored[first.name].sizes).is_turned
    except (OSError, KeyError, ValueError):
        return False


def text_view(folder: str, place: Path, *, is_filled: bool = False) -> str:
    """Return the folder from which an engine serves the text model of `folder`: that itself, or `place`.

    At `place` is then config.json of the text model alone, and a link to each other file. SGLang knows the names that
    tensors have there (`engines/model_checks.py`). A model of which SGLang has no class of the text part is served
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
