"""Whether the launch files of checkouts parse: `python tools/from_slime_scripts.py SLIME [MILES …]`.

Launch files are scripts that name train.py or train_async.py, and Python files that call `execute_train` or name
train.py in a command; of files with the same text one counts. Each runs in the sandbox. The model's folder is replaced
by a config.json of the shape that the launch's own flags describe, and other files by nothing; the checks that need
neither weights nor data are those of `fusionrl plan --cluster`. A file parses if all its launches do; else it is
refused, and each reason is printed. Values that only the machine of the run knows are not looked at.

A line "to change" names what keeps a command that parses from running as it stands: engines over several nodes, a
sample longer than a micro-batch. Models of families that fusionrl does not have are a matter of their own: the flags
are read all the same, and the line says which family is missing. A line "custom" names flags that neither slime nor
fusionrl has, which go into the file of --custom-config-path.
"""

import argparse
import ast
import collections
import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusionrl.checks.validate import elsewhere_errors
from fusionrl.compat.slime.arguments import left_parts, plain, set_apart
from fusionrl.compat.slime.flags import TABLE
from fusionrl.compat.slime.script import Launch, read_script
from fusionrl.compat.slime.translate import translate
from fusionrl.config.config import FIELDS
from fusionrl.config.hooks import flag_of
from fusionrl.config.parser import CommandLineError, read_args
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
    "gpt-oss": "gpt_oss",
}


@dataclass(frozen=True)
class Result:
    """One launch command: where it stands, and the model's family."""

    family: str
    errors: tuple[str, ...] = ()  # reasons for which it is refused
    limits: tuple[str, ...] = ()  # flags that are read, but whose run fusionrl does not plan as they stand
    is_family_here: bool = True
    custom: tuple[str, ...] = ()  # flags that neither slime nor fusionrl has


def launch_files(folders: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield every launch file, each with the checkout that has it; of files with the same text the first."""
    texts: set[str] = set()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".sh", ".py") and path.is_file()):
            text = path.read_text(encoding="utf-8", errors="replace")
            if is_launch_file(path, text) and text not in texts:
                texts.add(text)
                yield folder, path


def is_launch_file(path: Path, text: str) -> bool:
    """Return whether a file starts runs, by its text; Megatron-LM's own examples do not start slime's."""
    if "Megatron-LM" in path.parts:
        return False
    lines = [line for line in text.splitlines() if not re.match(r"\s*#|.*\b(pkill|pgrep)\b", line)]
    if path.suffix == ".sh":
        return any(re.search(r"(^|[\s/\"'])train(_async)?\.py\b", line) for line in lines)
    if re.search(r"def execute_train\(", text):
        return False
    return any(re.search(r"\bexecute_train\(|python3? .*\btrain(_async)?\.py", line) for line in lines)


def family_of(launch: Launch, claims: Mapping[str, object]) -> str:
    """The `model_type` that the launch's model has."""
    words = " ".join(map(plain, launch.argv)).lower()
    family_of_name = next((family for part, family in FAMILIES.items() if part in words), None)
    if family_of_name == "qwen3_5":
        return "qwen3_5_moe_text" if "num_experts" in claims else "qwen3_5_text"
    if family_of_name:
        return family_of_name
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
        "attention_bias": "add_qkv_bias" in claims or family == "gpt_oss",
        "partial_rotary_factor": float(str(claims.get("rotary_percent", 1.0))),
        "use_qk_norm": "qk_layernorm" in claims,
    }
    if "window_size" in claims:
        raw["sliding_window"] = int(str(claims["window_size"]).split(",")[0])
    if "attention_output_gate" in claims:  # whose delta nets no flag describes
        raw |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
        raw |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    if "kv_channels" in claims:
        raw["head_dim"] = number("kv_channels")
    if "num_experts" in claims:
        raw |= {
            **dict.fromkeys(("num_experts", "n_routed_experts"), number("num_experts")),
            "num_experts_per_tok": number("moe_router_topk"),
            "moe_intermediate_size": number("moe_ffn_hidden_size", number("ffn_hidden_size")),
            "n_shared_experts": number("moe_shared_expert_intermediate_size") // max(1, number("moe_ffn_hidden_size")),
            "shared_expert_intermediate_size": number("moe_shared_expert_intermediate_size"),
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


TEXT_PARTS = {"qwen3": "qwen3_vl", "qwen3_moe": "qwen3_vl_moe", "qwen3_5_text": "qwen3_5"}
TEXT_PARTS |= {"qwen3_5_moe_text": "qwen3_5_moe"}


def with_tower(raw: dict[str, object], family: str) -> dict[str, object]:
    """A config.json of the model that sees whose text part `raw` is; its tower has the usual sizes."""
    head = int(str(raw.get("head_dim", 128)))
    lanes = int(head * float(str(raw["partial_rotary_factor"]))) // 2
    section = {"mrope_section": [lanes - 2 * (lanes // 3), *[lanes // 3] * 2], "mrope_interleaved": True}
    vision = {"out_hidden_size": raw["hidden_size"], "deepstack_visual_indexes": [8, 16, 24]}
    text = raw | {"model_type": f"{TEXT_PARTS[family]}_text", "rope_scaling": section | {"rope_type": "default"}}
    tied = {"tie_word_embeddings": raw["tie_word_embeddings"]}
    return {"model_type": TEXT_PARTS[family], "text_config": text, "vision_config": vision} | tied


def check(place: Path, launch: Launch, written: Sequence[str], scratch: Path) -> Result:
    """Parse one launch as `fusionrl train` would, its model replaced. `written`: files that its script makes."""
    apart = set_apart(launch.argv)
    unknown = [*written, *(part for word in apart.argv for part in left_parts(word))]
    argv = [plain(word) for word in apart.argv]
    translated = translate(argv)
    claims = {name: value for name, value in translated.accepted.items() if "$" not in str(value)}
    family = family_of(launch, claims)
    model = scratch / f"{len(list(scratch.iterdir()))}"
    model.mkdir()
    raw = config_json(claims, family) if {"num_layers", "hidden_size", "vocab_size"} <= claims.keys() else {}
    sees = "--multimodal-keys" in argv and family in TEXT_PARTS
    raw = with_tower(raw, family) if raw and sees else raw
    (model / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    for position, word in enumerate(argv[:-1]):
        if word == "--hf-checkpoint":
            argv[position + 1] = str(model)
        elif word in ("--custom-config-path", "--eval-config"):  # from the folder in which its users start it
            files = (folder / argv[position + 1] for folder in place.parents)
            argv[position + 1] = str(next((file for file in files if file.is_file()), argv[position + 1]))
    errors: list[str] = []
    limits: list[str] = []
    is_here = True
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            config, errors = read_args(argv)
        shape = None
        if raw:
            try:
                shape = shape_from_hf_config(raw, "the model", sees=sees)
            except ValueError as error:
                is_here = False
                if not re.search(r"model_type '\w+' is not supported", str(error)):
                    errors.append(str(error))
        claimed = claim_errors(shape, claims) if shape is not None else []
        errors += claimed
        limits = [text for text in elsewhere_errors(config, None if claimed else shape) if text not in errors]
    except CommandLineError as error:
        errors += error.errors
    # What `from-slime` marks as NOT HERE is refused whatever its value is.
    certain = [*apart.errors, *translated.errors]
    other_errors = [error for error in errors if not any(part in error for part in unknown)]
    known = dict.fromkeys([*certain, *other_errors])
    family = TEXT_PARTS[family] if sees else family
    return Result(family if raw else "?", tuple(known), tuple(limits), is_here, tuple(apart.custom))


def flags_without_a_place(folder: Path) -> list[str]:
    """Return flags that a checkout of slime declares, in its own parser, and that no table here has."""
    names: set[str] = set()
    for file in ("utils/arguments.py", "backends/sglang_utils/arguments.py"):
        path = folder / "slime" / file
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ():
            if isinstance(node, ast.Call):
                constants = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
                names |= {
                    value[2:].replace("-", "_") for value in map(str, constants) if re.fullmatch(r"--[\w-]+", value)
                }
    of_sglang = {name for name in names if name.startswith(("sglang_", "router_"))}  # passed to the parts by their name
    return sorted(names - of_sglang - FIELDS.keys() - TABLE.keys())


def check_file(path: Path, scratch: Path) -> list[Result]:
    """Return the result of each launch of a file; a file that cannot be read has one, with the reason."""
    try:
        script = read_script(path)
    except ValueError as error:
        return [Result("?", (str(error).partition(": ")[2],))]
    return [check(path, launch, list(map(plain, script.files)), scratch) for launch in script.launches]


def show(place: str, results: Sequence[Result]) -> None:
    """Print what became of one file."""
    errors = list(dict.fromkeys(error for result in results for error in result.errors))
    family = ", ".join(
        dict.fromkeys(
            result.family if result.is_family_here else f"{result.family}: no family here" for result in results
        )
    )
    print(f"{'refused' if errors else 'parses ':8}{place} ({family})")
    limits = dict.fromkeys(f"to change: {limit}" for result in results for limit in result.limits)
    custom = ", ".join(dict.fromkeys(flag_of(name) for result in results for name in result.custom))
    for line in [*errors, *limits, *([f"custom: {custom}"] if custom else [])]:
        print(f"         {line}")


def main() -> int:
    """Print what becomes of each launch file, the reasons by their number, and how many parse."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="checkouts of slime, of its forks and of its users")
    folders: list[Path] = [folder.resolve() for folder in parser.parse_args().folders]
    rows: dict[str, list[list[Result]]] = {folder.name: [] for folder in folders}
    reasons: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as scratch:
        for folder, path in launch_files(folders):
            results = check_file(path, Path(scratch))
            rows[folder.name].append(results)
            show(f"{folder.name}/{path.relative_to(folder)}", results)
            reasons.update({re.split(r"[ :;]", error)[0] for result in results for error in result.errors})
    print("\nrefused because of: " + ", ".join(f"{name} ({count})" for name, count in reasons.most_common()))
    for folder in folders:
        if missing := flags_without_a_place(folder):
            print(f"flags of {folder.name}'s own parser without a place: {', '.join(missing)}")
    everything = [results for files in rows.values() for results in files]
    for name, files in {**rows, "all": everything}.items():
        parsed = [results for results in files if not any(result.errors for result in results)]
        num_planned = sum(
            not any(result.limits or not result.is_family_here for result in results) for results in parsed
        )
        num_custom = sum(any(result.custom for result in results) for results in parsed)
        print(
            f"{name}: {len(parsed)} of {len(files)} files parse, {num_custom} of them with flags of their own;"
            f" {num_planned} run as they stand"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
