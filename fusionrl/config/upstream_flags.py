"""Field lists of SGLang, its router and Megatron-core, read from the installed packages when they are needed.

The one place of `config` that imports them, and only inside functions: a command line that names none of their flags
never pays for the import. SGLang's parser imports torch and all of SGLang, 3 s of CPU time, so a file keeps it: it
describes the options that are plain (a number, a text, a switch, with or without choices). What it does not describe,
and every value that it would refuse, is for the package's own parser, and so every message is the package's.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from fusionrl.base import cpu_wing
from fusionrl.base.files import cache_path, file_fact, read_cache, write_cache
from fusionrl.base.imports import quiet
from fusionrl.base.wording import closest

_SWITCHES: dict[type, str] = {argparse._StoreTrueAction: "store_true", argparse._StoreFalseAction: "store_false"}
_TYPES = {None: None, int: "int", float: "float", str: "str"}
_FORM = 2  # of the file: names of an option, and its arguments of `add_argument`


class _Unknown(Exception):
    """The file cannot say: the package's own parser has to."""


class _ForTheOther(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        raise _Unknown


class KeptParser(argparse.ArgumentParser):
    """A parser of the options in a file, with the package's own behind it."""

    def __init__(self, options: Iterable[Any], real: Callable[[], argparse.ArgumentParser]) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.real = real
        self.register("action", "other", _ForTheOther)
        for kind in (int, float, str):
            self.register("type", kind.__name__, kind)
        for names, settings in options:
            self.add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        """Leave every refusal to the package."""
        raise _Unknown(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as the package's parser does."""
        try:
            return super().parse_known_args(args, namespace)
        except _Unknown:
            real = self.real()
            for action in real._actions:
                action.required = False
            return real.parse_known_args(args, namespace)


def own_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the package's own parser, which is imported if `parser` is from a file."""
    return parser.real() if isinstance(parser, KeptParser) else parser


def describe(parser: argparse.ArgumentParser) -> list[tuple[list[str], dict[str, Any]]]:
    """Every option of a parser, for the file: its names, and its arguments of `add_argument`."""
    entries: list[tuple[list[str], dict[str, Any]]] = []
    for action in parser._actions:
        choices = None if action.choices is None else list(action.choices)
        is_store = type(action) is argparse._StoreAction and action.type in _TYPES and action.const is None
        is_text = choices is None or all(isinstance(choice, str | int | float) for choice in choices)
        settings: dict[str, Any] = {"dest": action.dest, "nargs": action.nargs, "action": "other"}
        if type(action) in _SWITCHES:
            settings = {"dest": action.dest, "action": _SWITCHES[type(action)]}
        elif is_store and is_text and action.nargs in (None, "+", "*"):
            kind = _TYPES[action.type]  # type: ignore[index]
            settings = {"dest": action.dest, "nargs": action.nargs, "type": kind, "choices": choices}
        if action.option_strings:
            entries.append((list(action.option_strings), settings))
    return entries


def kept_parser(
    package: str, version: str, sources: Iterable[Path], real: Callable[[], argparse.ArgumentParser]
) -> argparse.ArgumentParser:
    """The parser of a package, from the file where there is one; else the package's own, and the file is written.

    version  versions of all packages that may change the options
    sources  files of the package that declare its options
    real     imports the package and gives its parser
    """
    try:
        facts = [file_fact(source, source.stat()) for source in sorted(sources)]
        path = cache_path(f"{package}-flags", [str(_FORM), version, *facts])
    except RuntimeError:  # a user without a home
        return real()
    if isinstance(options := read_cache(path), list):
        with contextlib.suppress(TypeError, ValueError, argparse.ArgumentError):  # of another form
            return KeptParser(options, real)
    parser = real()
    with contextlib.suppress(OSError, TypeError, ValueError):  # a missing folder, an option that JSON cannot hold
        write_cache(path, describe(parser))
    return parser


def _by_field(owners: dict[str, str]) -> dict[str, str]:
    return {field: owner for owner, fields in owners.items() for field in fields.split()}


# Fields of SGLang's ServerArgs, its router and Megatron-core's config classes that fusionrl sets itself. Each is listed
# under the flag to use in its place, or under what sets it.
SGLANG_OWNED = _by_field(
    {
        "--hf-checkpoint": "model_path",
        "the node's own address": "host",
        "a free port": "port nccl_port disaggregation_bootstrap_port",
        "a key made for the run": "api_key admin_api_key",
        "--device": "device",
        "--rollout-dtype": "dtype",
        "--rollout-num-gpus-per-engine": "tp_size tensor_parallel_size",
        "the placement": "base_gpu_id gpu_id_step nnodes node_rank dist_init_addr",
        "--rollout-seed": "random_seed",
        # An engine is one replica of tensor-parallel ranks: placement and weight push count on it.
        "--rollout-num-gpus: more devices are more engines, behind one router": "dp_size enable_dp_attention",
        "--rollout-num-gpus-per-engine: an engine is divided by tensor parallelism alone": "pp_size",
        "--engine-group: role=prefill and role=decode": "disaggregation_mode",
    }
)
ROUTER_OWNED = _by_field(
    {
        "the run's own engines": "worker_urls",
        "the node's own address": "host",
        "a key made for the run": "api_key",
        "the run's folder": "log_dir",
    }
)
MEGATRON_OWNED = _by_field(
    {
        "--precision": "bf16 fp16 params_dtype pipeline_dtype",
        "the Hugging Face config": "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size"
        " kv_channels layernorm_epsilon normalization qk_layernorm add_bias_linear add_qkv_bias gated_linear_unit"
        " activation_func rotary_interleaved num_moe_experts moe_ffn_hidden_size moe_layer_freq moe_router_topk"
        " moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups"
        " moe_router_group_topk moe_router_enable_expert_bias moe_shared_expert_intermediate_size"
        " moe_shared_expert_gate multi_latent_attention attention_output_gate layernorm_zero_centered_gamma"
        " linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads"
        " linear_num_value_heads",
        "--calculate-per-token-loss": "calculate_per_token_loss",
        "the trainer": "finalize_model_grads_func variable_seq_lengths",
        "the trainer (Adam)": "optimizer",
        "the trainer (always on)": "use_distributed_optimizer",
        "--transformer-impl": "transformer_impl",
    }
)

# Options that the installed version has under another name: launch scripts keep the older one.
RENAMED: dict[str, str] = {
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--nsa-prefill-backend": "--dsa-prefill-backend",
    "--nsa-decode-backend": "--dsa-decode-backend",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
}


class UpstreamError(ValueError):
    """A pass-through flag that upstream does not take."""


def _owned(source: str) -> UpstreamError:
    return UpstreamError("it is set by fusionrl" + (f"; use {source}" if source[:2] == "--" else f" ({source})"))


class _QuietParser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UpstreamError(message)


@functools.cache
def sglang_parser() -> argparse.ArgumentParser:
    """SGLang's command line, as its installed version declares it; kept in a file after its first import."""
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        return _import_sglang_parser()
    root = Path(package.origin).parent / "srt"
    sources = [root / "server_args.py", *root.glob("arg_groups/**/*.py")]
    sources.append(Path(cpu_wing.__file__))  # it names a choice of ours
    try:
        versions = " ".join(importlib.metadata.version(name) for name in ("sglang", "torch"))
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return _import_sglang_parser()
    return kept_parser("sglang", versions, [path for path in sources if path.is_file()], _import_sglang_parser)


@functools.cache
def _import_sglang_parser() -> argparse.ArgumentParser:
    cpu_wing.install_stand_ins()
    parser = _QuietParser(add_help=False, allow_abbrev=False)
    with quiet():
        from sglang.srt.server_args import ServerArgs

        add_cpu_attention()
        ServerArgs.add_cli_args(parser)
    return parser


def add_cpu_attention() -> None:
    """Let SGLang's command line take the attention of engines on a CPU. Idempotent."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if cpu_wing.ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([cpu_wing.ATTENTION_BACKEND])


@functools.cache
def router_parser() -> argparse.ArgumentParser:
    """The router's own command line, as its installed version declares it."""
    parser = _QuietParser(add_help=False, allow_abbrev=False)
    with quiet():
        from sglang_router.router_args import RouterArgs

        RouterArgs.add_cli_args(parser, use_router_prefix=False, exclude_host_port=False)
    return parser


# Parts whose flags begin with their name: their parser, and the fields that fusionrl sets.
PARTS: dict[str, tuple[Callable[[], argparse.ArgumentParser], dict[str, str]]] = {
    "sglang": (sglang_parser, SGLANG_OWNED),
    "router": (router_parser, ROUTER_OWNED),
}


def split_flag(flag: str) -> tuple[str, str]:
    """Split `--router-policy` into ("router", "--policy"); the part is "" for a flag of none of PARTS."""
    kind, _, option = flag.removeprefix("--").partition("-")
    return (kind, f"--{option}") if kind in PARTS and option else ("", flag)


def parse_with(
    parser: argparse.ArgumentParser, option: str, values: list[str], owned: dict[str, str]
) -> dict[str, object]:
    """The fields that `option values…` sets by upstream's own parser, or an UpstreamError.

    A list that it reads from one JSON text stays that text: so it is handed to engines.
    """
    if not {option, RENAMED.get(option)} & parser._option_string_actions.keys():
        parser = own_parser(parser)  # the file may be older than the package
    if option not in parser._option_string_actions:
        option = RENAMED.get(option, option)
    action = parser._option_string_actions.get(option)
    if action is None:
        raise UpstreamError(f"{option} does not exist in the installed version")
    if action.dest in owned:
        raise _owned(owned[action.dest])
    for required in parser._actions:
        required.required = False
    # "=": a value that begins with "-" is a value, not the next flag.
    parsed, rest = parser.parse_known_args([f"{option}={values[0]}"] if len(values) == 1 else [option, *values])
    if rest:
        raise UpstreamError(f"unexpected value {' '.join(rest)}")
    value = getattr(parsed, action.dest)
    is_text = action.nargs is None and isinstance(value, list) and len(values) == 1 and values[0].startswith("[")
    return {action.dest: values[0] if is_text else value}


def is_switch(parser: argparse.ArgumentParser, option: str) -> bool:
    """Return whether upstream's option takes no value."""
    return num_values(parser, option) == 0


def num_values(parser: argparse.ArgumentParser, option: str) -> int:
    """Return how many values upstream's option takes; -1: several, 1: also one that upstream does not have."""
    if option not in parser._option_string_actions:
        parser = own_parser(parser)
    action = parser._option_string_actions.get(option)
    if action is None or action.nargs in (None, argparse.OPTIONAL):
        return 1
    return action.nargs if isinstance(action.nargs, int) else -1


def check_field(kind: str, name: str) -> None:
    """Check that upstream has the field `name` of a run's config.json, and fusionrl does not set it: UpstreamError."""
    if kind in PARTS:
        parser, owned = PARTS[kind][0](), PARTS[kind][1]
        known = {action.dest for action in parser._actions}
        if name not in known:
            known = {action.dest for action in own_parser(parser)._actions}
    else:
        known, owned = set(megatron_fields()[kind]), MEGATRON_OWNED
    if name not in known:
        close = closest(name, known, cutoff=0.7)
        hint = f"; did you mean {close}?" if close else ""
        raise UpstreamError(f"the installed version has no such field{hint}")
    if name in owned:
        raise _owned(owned[name])


def option_names(parser: argparse.ArgumentParser, prefix: str) -> list[str]:
    """The parser's options as fusionrl spells them, for 'did you mean'."""
    return [f"--{prefix}-{name[2:]}" for name in parser._option_string_actions if name.startswith("--")]


@functools.cache
def megatron_fields() -> dict[str, dict[str, object]]:
    """Return field name → type for each Megatron-core config class: transformer, optimizer, ddp."""
    with quiet():
        cpu_wing.prepare_megatron()
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import TransformerConfig

    classes = {"transformer": TransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
    return {kind: {f.name: _hint(cls, f) for f in dataclasses.fields(cls)} for kind, cls in classes.items()}


def _hint(cls: type, field: dataclasses.Field) -> object:
    # Some annotations name modules that are not installed; those fields stay plain strings.
    if not isinstance(field.type, str):
        return field.type
    try:
        return typing.get_type_hints(cls)[field.name]
    except (NameError, AttributeError, TypeError):
        return str


def parse_megatron(field: str, values: list[str]) -> dict[str, object]:
    """Class kind → value for every Megatron class that has `field`. UpstreamError: fusionrl owns it, or a bad value."""
    fields = megatron_fields()
    name, negated = (field[3:], True) if field.startswith("no_") else (field, False)
    if negated and any(field in of for of in fields.values()):
        name, negated = field, False
    kinds = [kind for kind, of in fields.items() if name in of]
    if not kinds:
        raise KeyError(field)
    if name in MEGATRON_OWNED:
        raise _owned(MEGATRON_OWNED[name])
    if negated:
        if values:
            raise UpstreamError("a --no- flag takes no value")
        return dict.fromkeys(kinds, False)
    return {kind: _convert(fields[kind][name], values) for kind in kinds}


def _convert(hint: object, values: list[str]) -> object:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    options = tuple(option for option in options if option is not type(None))
    if not values:
        if bool in options:
            return True
        raise UpstreamError("it needs a value")
    text = values[0] if len(values) == 1 else None
    if text is not None and text.lower() == "none":
        return None
    for option in options:
        origin = typing.get_origin(option) or option
        try:
            if origin is bool and text is not None and text.lower() in ("true", "false"):
                return text.lower() == "true"
            if origin in (int, float) and text is not None:
                return origin(text)
            if origin is typing.Literal and text in typing.get_args(option):
                return text
            if origin in (list, tuple):
                return [json.loads(value) if value[:1] in '-0123456789["{' else value for value in values]
            if origin is dict and text is not None:
                return json.loads(text)
            if origin is str and text is not None:
                return text
        except ValueError:
            continue
    raise UpstreamError(f"value {' '.join(values)!r} does not fit its type {hint}")
