"""An engine that another process starts and ends, controlled by its address."""

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from fusionrl.engines.answers import as_list, as_object
from fusionrl.engines.engine import EngineControl
from fusionrl.engines.http import EndpointError
from fusionrl.engines.images import ImageSettings, refused
from fusionrl.models.engine_config import engine_fields
from fusionrl.models.shape import ModelShape, differences, read_model_shape, read_text_config, shape_from_hf_config

OLDEST = (0, 5, 17)
"""Of SGLang's versions, whose weight updates are those that a push sends."""


@dataclass(frozen=True)
class EngineRequirements:
    """The engine that a run can use."""

    model_path: str
    architectures: tuple[str, ...]
    shape: ModelShape
    dtype: str  # "float32" or "bfloat16"
    flags: dict[str, object] = field(default_factory=dict)  # ServerArgs fields that the run's own engines need
    # Others that are the same for all engines, also where the run does not set them (None).
    alike: dict[str, object] = field(default_factory=dict)
    overrides: dict[str, object] = field(default_factory=dict)  # of the run's own engines (json_model_override_args)
    images: ImageSettings | None = None  # None: the run has no images
    wait_s: float = 0.0  # time in which a server that is still starting has to answer
    by_ipc: bool = False  # weights go by CUDA IPC, from the trainer on an engine's own GPU
    only_here: bool = False  # weights go by broadcast, in a run that listens on loopback alone


@dataclass(frozen=True)
class ExternalEngineFacts:
    """Facts about an engine that fits."""

    version: str
    tp_size: int
    ep_size: int


class AttachedEngine(EngineControl):
    """Controls the server at `url`. Unlike the actor it can be pickled; of a server that died it knows no log."""

    def __init__(self, index: int, url: str, tp_size: int, api_key: str | None = None) -> None:
        super().__init__(url, tp_size, api_key)
        self.index = index

    def post(self, path: str, payload: Mapping[str, object] | None = None) -> object:
        """Any other request."""
        return self._post(path, payload)

    # ---- joining and leaving

    def join(self, expected: EngineRequirements, *own_weights: list[dict[str, str]] | None) -> ExternalEngineFacts:
        """Ask the server what it is. `own_weights` are the checksums of the run's own engine, where no push comes.

        Raises ValueError with reason and cure if the run cannot use it, RuntimeError if it does not answer in time.
        """
        if reason := _out_of_reach(self.url, expected):
            raise ValueError(f"engine at {self.url}: {reason}")
        deadline = time.monotonic() + expected.wait_s
        while (fault := self.fault()) is not None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"engine at {self.url}: {fault}")
            time.sleep(1.0)
        try:
            model = as_object(self._call("GET", "/model_info"), "/model_info")
            args = as_object(self._call("GET", "/server_info"), "/server_info")
        except EndpointError as error:
            if error.status in (401, 403):
                raise ValueError(
                    f"engine at {self.url}: it asks for another key; start it with --api-key, and export the same as"
                    " FUSIONRL_ENGINE_KEY where the run starts"
                ) from error
            raise
        if errors := misfits(model, args, expected):
            raise ValueError(f"engine at {self.url}: " + "; ".join(errors))
        self._tp_size = _number(args, "tp_size")
        for checksums in own_weights:
            if reason := other_weights(self.weight_checksums(), checksums):
                raise ValueError(f"engine at {self.url}: {reason}")
        return ExternalEngineFacts(str(args.get("version")), self._tp_size, _number(args, "ep_size"))

    def fault(self) -> str | None:
        """Return why the server does not answer, or None; Ray would log an exception of a call that is not awaited."""
        try:
            self._call("GET", "/health", timeout_s=20.0)
        except RuntimeError as error:
            return str(error)
        return None

    def num_running(self) -> int:
        """Requests that the server works on, those that wait included."""
        loads = as_list(as_object(self._call("GET", "/v1/loads"), "/v1/loads")["loads"], "loads of /v1/loads")
        ranks = [as_object(rank, "a load") for rank in loads]
        return sum(_number(rank, "num_running_reqs", 0) + _number(rank, "num_waiting_reqs", 0) for rank in ranks)

    def release(self) -> None:
        """Leave the server as it can be used without the run: no group, no open update, not paused. Idempotent."""
        self.leave_groups()
        ends = ["/end_weight_update"] if self._has_update_sessions else []  # refused where none is open
        for path in [*ends, "/continue_generation"]:
            with suppress(RuntimeError):  # the server is gone, or had nothing to end
                self._post(path, timeout_s=10.0)

    # ---- weights

    def pull_weights(self, folder: str, local_folder: str | None) -> str | None:
        """Return the folder of a full version, which the server reads itself; None for a delta: it needs a full one."""
        from fusionrl.engines.disk_versions import Manifest, pull_version

        return None if Manifest.read(folder).base is not None else pull_version(folder, None)

    def drop_local_copy(self, local_folder: str) -> None:
        """Nothing: such an engine has no copy."""


def misfits(model: Mapping[str, object], args: Mapping[str, object], expected: EngineRequirements) -> list[str]:
    """List why a run cannot use an engine, whose answers to /model_info and /server_info are `model` and `args`."""
    errors = []
    version = str(args.get("version", "0"))
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        errors.append(f"its SGLang is {version}; a push needs {'.'.join(map(str, OLDEST))} or later")
    if not model.get("is_generation", True):
        errors.append("it does not generate")
    errors += _other_model(model, expected) or _other_reading(model, args, expected)
    dtype = args.get("dtype")
    if dtype == "auto":
        dtype = _dtype_of(str(model.get("model_path"))) or "a precision that cannot be read here (--dtype auto)"
    if dtype != expected.dtype:
        errors.append(f"it computes in {dtype}; start it with --dtype {expected.dtype}")
    for name in ("pp_size", "dp_size"):
        if _number(args, name) > 1:
            errors.append(f"it has --{name.replace('_', '-')} {args[name]}; a push reaches tensor-parallel ranks alone")
    for name, value in (expected.flags | expected.alike).items():
        if (args.get(name) or None) != (value or None):
            flag, text = "--" + name.replace("_", "-"), json.dumps(value) if isinstance(value, dict) else str(value)
            cure = f"with {flag}" + ("" if value is True else f" {text}") if value else f"without {flag}"
            errors.append(f"its {flag} is {args.get(name)}; start it {cure}, as this run's own engines are")
    if expected.images is not None and (reason := refused(args, "its --")) is not None:
        errors.append(reason)
    return errors


def _dtype_of(path: str) -> str | None:
    """Return the dtype that SGLang chooses for --dtype auto: the checkpoint's, but never fp32; None if unknown."""
    try:
        config = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    named = config.get("dtype") or config.get("torch_dtype")
    return {"float32": "float16", "float16": "float16", "bfloat16": "bfloat16"}.get(str(named))


def other_weights(checksums: list[dict[str, str]] | None, expected: list[dict[str, str]] | None) -> str | None:
    """Return why a run without pushes cannot use an engine with these checksums by rank; None if it expects them."""
    if expected is None or checksums is None:
        return (
            "this run pushes no weights, and SGLang has no checksums here to compare them by; leave the engine out, or"
            " raise --rollout-num-gpus"
        )
    if len(checksums) != len(expected):
        return f"this run pushes no weights, and compares them rank by rank: start it with --tp-size {len(expected)}"
    wrong = sorted({name for a, b in zip(checksums, expected, strict=True) for name, _ in a.items() ^ b.items()})
    if not wrong:
        return None
    return (
        f"this run pushes no weights, and {len(wrong)} tensors of the engine differ from --hf-checkpoint"
        f" ({', '.join(wrong[:3])}); start it with this checkpoint, as this run's own engines are"
    )


def _other_model(model: Mapping[str, object], expected: EngineRequirements) -> list[str]:
    """The message where it serves another model: by the names of its classes, and by its config.json if it is here."""
    path, classes = str(model.get("model_path")), model.get("architectures")
    message = f"it serves {path}, another model than --hf-checkpoint {expected.model_path}"
    fields = engine_fields(expected.model_path)  # with a model_type: the run's own engines read another config.json
    if isinstance(classes, list) and tuple(classes) != expected.architectures:
        cure = "; start it on a copy of the folder with these fields in config.json: " + json.dumps(fields)
        names = f"({', '.join(map(str, classes))}, not {', '.join(expected.architectures)})"
        return [f"{message} {names}{cure if 'model_type' in fields else ''}"]
    if not Path(path, "config.json").is_file():  # on another host, or a version of the weights that is gone
        return []
    try:
        shape = read_model_shape(path, sees=expected.shape.vision is not None).trunk
    except ValueError as error:
        return [f"{message}: {error}"]
    own = expected.shape.trunk
    if shape.model_type == fields.get("model_type"):
        own = shape_from_hf_config({**read_text_config(expected.model_path, "--hf-checkpoint"), **fields})
    facts = [f"{name} {theirs}, not {ours}" for name, theirs, ours in differences(shape, own)]
    return [f"{message} ({', '.join(facts[:3])})"] if facts else []


def _other_reading(model: Mapping[str, object], args: Mapping[str, object], expected: EngineRequirements) -> list[str]:
    """The message where it reads its config.json otherwise than the run's own engines do, which get such fields."""
    path, told = str(model.get("model_path")), args.get("json_model_override_args")
    given = json.loads(str(told or "{}"))
    folder = path if Path(path, "config.json").is_file() else expected.model_path
    fields = engine_fields(folder, sees=expected.shape.vision is not None)
    fields = {name: value for name, value in fields.items() if name != "architectures"} | expected.overrides
    missing = {name: value for name, value in fields.items() if name not in given or given[name] != value}
    if not missing:
        return []
    return [
        "SGLang reads its config.json otherwise than trainers do; start it with --json-model-override-args"
        f" '{json.dumps(given | missing)}', as this run's own engines are"
    ]


def _out_of_reach(url: str, expected: EngineRequirements) -> str | None:
    """Return why the weights of the run do not reach an engine; None where they do."""
    if expected.by_ipc:
        return "weights go by CUDA IPC in this run; use --update-weight-transport disk"
    host = host_of(url)
    if expected.only_here and host != "localhost" and not host.startswith("127.") and host != "::1":
        return (
            "it is on another machine, and this run listens on loopback alone; use --update-weight-transport disk, or"
            " a Ray cluster (--ray-address)"
        )
    return None


def host_of(url: str) -> str:
    return urlsplit(url).hostname or ""


def _number(values: Mapping[str, object], name: str, otherwise: int = 1) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else otherwise
