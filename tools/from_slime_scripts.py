"""Whether the launch commands of a checkout of slime's parse: `python tools/from_slime_scripts.py --slime DIR`.

Every script that starts train.py or train_async.py is read, never run. The model's folder is replaced by a config.json
of the shape that the script's own flags describe, and other files by nothing; the checks that need neither weights nor
data are those of `fusionrl plan --cluster`. A command either parses, or is refused with the reason.

A line "to change" names what keeps a command that parses from running as it stands: engines over several nodes, a
sample longer than a micro-batch. Models of families that fusionrl does not have are a matter of their own: the flags
are read all the same, and the line says which family is missing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fusionrl.checks.validate import validate_flags
from fusionrl.config.fields import FIELDS
from fusionrl.config.parser import CommandLineError, read_args
from fusionrl.config.slime.script import Launch, read_script
from fusionrl.config.slime.shell import plain
from fusionrl.config.slime.table import TABLE
from fusionrl.config.slime.translate import translate
from fusionrl.models.shape import shape_from_hf_config
from fusionrl.models.shape_claims import claim_errors, layer_pattern

# Parts of paths and of --spec that name a family, the first that fits.
FAMILIES = {
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "glm5": "glm_moe_dsa",
    "minimax": "minimax_m2",
    "mimo": "mimo",
    "get_glm_spec": "glm4",
}


@dataclass(frozen=True)
class Result:
    """One launch command: where it stands, and the model's family.

    errors  reasons for which it is refused
    limits  flags that are read, but whose run fusionrl does not plan as they stand
    """

    place: str
    family: str
    errors: tuple[str, ...]
    limits: tuple[str, ...]
    is_family_here: bool


def launches(folder: Path) -> Iterator[tuple[Path, Launch]]:
    """Every launch command of the checkout."""
    for path in sorted(folder.rglob("*.sh")):
        if re.search(r"train(_async)?\.py", path.read_text(encoding="utf-8", errors="replace")):
            for launch in read_script(path).launches:
                yield path, launch


def family_of(launch: Launch, claims: Mapping[str, object]) -> str:
    """The `model_type` that the script's model has."""
    words = " ".join(map(plain, launch.argv)).lower()
    found = next((family for part, family in FAMILIES.items() if part in words), None)
    if found:
        return found
    if "multi_latent_attention" in claims:
        return "deepseek_v3"
    if claims.get("moe_router_score_function") == "sigmoid":
        return "glm4_moe"
    if "num_experts" in claims:
        return "qwen3_moe"
    if "qk_layernorm" in claims:
        return "qwen3"
    return "qwen2" if "add_qkv_bias" in claims else "llama"


def config_json(claims: Mapping[str, object], family: str) -> dict[str, object]:
    """A config.json of the shape that the flags `claims` describe."""

    def number(name: str, default: float = 0) -> int:
        return int(float(str(claims.get(name, default))))

    layers = number("num_layers")
    moe = layer_pattern(str(claims.get("moe_layer_freq", "1")), layers) or []
    dense = moe.index(1) if 1 in moe else 0
    raw: dict[str, object] = {
        "model_type": family,
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "hidden_size": number("hidden_size"),
        "intermediate_size": number("ffn_hidden_size"),
        "num_attention_heads": number("num_attention_heads"),
        "num_key_value_heads": number("num_query_groups", number("num_attention_heads")),
        "vocab_size": number("vocab_size"),
        "max_position_embeddings": 131072,
        "rms_norm_eps": float(str(claims.get("norm_epsilon", 1e-5))),
        "rope_theta": float(str(claims.get("rotary_base", 10000))),
        "tie_word_embeddings": "untie_embeddings_and_output_weights" not in claims,
        "attention_bias": "add_qkv_bias" in claims,
        "partial_rotary_factor": float(str(claims.get("rotary_percent", 1.0))),
        "use_qk_norm": "qk_layernorm" in claims,
    }
    if "kv_channels" in claims:
        raw["head_dim"] = number("kv_channels")
    if "num_experts" in claims:
        raw |= {
            **dict.fromkeys(("num_experts", "n_routed_experts"), number("num_experts")),
            "num_experts_per_tok": number("moe_router_topk"),
            "moe_intermediate_size": number("moe_ffn_hidden_size"),
            "n_shared_experts": number("moe_shared_expert_intermediate_size") // number("moe_ffn_hidden_size"),
            "first_k_dense_replace": dense,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "n_group": number("moe_router_num_groups", 1),
            "topk_group": number("moe_router_group_topk", 1),
            "routed_scaling_factor": float(str(claims.get("moe_router_topk_scaling_factor", 1.0))),
            "topk_method": "noaux_tc",
        }
    if "multi_latent_attention" in claims:
        raw |= {
            "q_lora_rank": number("q_lora_rank") or None,
            "kv_lora_rank": number("kv_lora_rank"),
            "qk_nope_head_dim": number("qk_head_dim"),
            "qk_rope_head_dim": number("qk_pos_emb_head_dim"),
            "v_head_dim": number("v_head_dim"),
            "attention_bias": False,
        }
        if number("rotary_scaling_factor", 1) > 1:
            raw["rope_scaling"] = {
                "rope_type": "yarn",
                "factor": float(str(claims["rotary_scaling_factor"])),
                "mscale": float(str(claims.get("mscale", 1.0))),
                "mscale_all_dim": float(str(claims.get("mscale_all_dim", 0.0))),
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
            }
    return raw


def check(folder: Path, path: Path, launch: Launch, scratch: Path) -> Result:
    """Parse one launch command as `fusionrl train` would, its model replaced."""
    argv = [plain(word) for word in launch.argv]
    translated = translate(argv)
    claims = translated.accepted
    family = family_of(launch, claims)
    model = scratch / f"{len(list(scratch.iterdir()))}"
    model.mkdir()
    raw = config_json(claims, family) if "num_layers" in claims else {}
    (model / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    for position, word in enumerate(argv[:-1]):
        if word == "--hf-checkpoint":
            argv[position + 1] = str(model)
        elif word in ("--custom-config-path", "--eval-config") and (folder / argv[position + 1]).is_file():
            argv[position + 1] = str(folder / argv[position + 1])
    errors: list[str] = []
    limits: list[str] = []
    is_here = True
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            config, errors = read_args(argv)
        shape = None
        if raw:
            try:
                shape = shape_from_hf_config(raw, "the model")
            except ValueError as error:
                is_here = False
                if "is not supported; supported are" not in str(error):
                    errors.append(str(error))
        claimed = claim_errors(shape, claims) if shape is not None else []
        errors += claimed
        limits = [text for text in validate_flags(config, None if claimed else shape) if text not in errors]
    except CommandLineError as error:
        errors += error.errors
    return Result(
        str(path.relative_to(folder)), family if raw else "?", tuple(dict.fromkeys(errors)), tuple(limits), is_here
    )


def flags_without_a_place(folder: Path) -> list[str]:
    """Flags that slime's own parser declares and no table of ours has."""
    names: set[str] = set()
    for file in ("utils/arguments.py", "backends/sglang_utils/arguments.py"):
        path = folder / "slime" / file
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ():
            if isinstance(node, ast.Call):
                given = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
                names |= {value[2:].replace("-", "_") for value in map(str, given) if re.fullmatch(r"--[\w-]+", value)}
    of_sglang = {name for name in names if name.startswith(("sglang_", "router_"))}  # passed to the parts by their name
    return sorted(names - of_sglang - FIELDS.keys() - TABLE.keys())


def main() -> int:
    """Print a line for each launch command, and how many parse."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--slime", type=Path, required=True, help="a checkout of slime")
    folder: Path = parser.parse_args().slime.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        results = [check(folder, path, launch, Path(scratch)) for path, launch in launches(folder)]
    for result in results:
        family = result.family if result.is_family_here else f"{result.family}: no family here"
        print(f"{'refused' if result.errors else 'parses ':8}{result.place} ({family})")
        for error in result.errors:
            print(f"         {error}")
        for limit in result.limits:
            print(f"         to change: {limit}")
    num_parsed = sum(not result.errors for result in results)
    num_foreign = sum(not result.errors and not result.is_family_here for result in results)
    num_planned = sum(not (result.errors or result.limits) and result.is_family_here for result in results)
    missing = flags_without_a_place(folder)
    print(f"flags of slime's without a place: {', '.join(missing) or 'none'}")
    print(
        f"{num_parsed} of {len(results)} parse, {num_foreign} of them for models of families that are not here;"
        f" {num_planned} run as they stand"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
