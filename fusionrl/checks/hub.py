"""Names of the Hugging Face Hub in place of folders: resolved once, so that every process reads the same folder.

A name is looked up in the local cache first. A missing file is downloaded, if the Hub answers within seconds; if
not, the error says how to get it.
"""

import importlib.util
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fusionrl.base.files import publish_folder
from fusionrl.base.imports import quiet
from fusionrl.base.wording import install_hint
from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of
from fusionrl.data.rows import SUFFIXES, choose_split, find_splits
from fusionrl.models.hf_folder import check_weight_files

# Flags that name a Hugging Face folder.
CHECKPOINTS = ("hf_checkpoint", "ref_load", "rm_model", "opd_teacher_load", "critic_load", "prm_load")
ANSWER_TIMEOUT_S = 8.0  # for the Hub to say that it has a repository
_OTHER_FORMATS = (".arrow", ".csv", ".gz", ".tsv", ".txt", ".xz", ".zip", ".zst")
TOKENIZERS = {"tokenizer.json", "tokenizer.model", "vocab.json"}
_PART = r"[A-Za-z0-9][\w.-]*"
_MODEL = re.compile(f"{_PART}/{_PART}")
_DATA = re.compile(rf"(?:([\w-]+)=)?({_PART}/{_PART})((?:/{_PART})*)(?::([\w.-]+))?(@\[-?\d*:-?\d*\])?")
# Of a model's repository what is read here: nothing in folders, where other formats of the weights lie.
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


class HubError(ValueError):
    """A name of the Hub that cannot be had from here."""


def resolve_names(config: Config, *, with_weights: bool = True) -> tuple[Config, list[str]]:
    """Return `config` with folders and files in place of the Hub's names, and a message for each that is not there.

    with_weights  False: config and tokenizer are enough
    """
    needs_weights = with_weights and not config.model.debug_random_weights
    names = {field: config.value(field) for field in CHECKPOINTS}
    finds: dict[str, Callable[[], object]] = {
        field: partial(find_model, name, flag_of(field), needs_weights)
        for field, name in names.items()
        if name is not None and is_model_name(name)
    }
    specs, pairs = config.data.prompt_data or [], config.eval.eval_prompt_data
    if any(map(is_data_name, specs)):
        finds["prompt_data"] = lambda: [find_data(spec, "--prompt-data") for spec in specs]
    if any(map(is_data_name, pairs[1::2])):
        finds["eval_prompt_data"] = lambda: [
            find_data(value, "--eval-prompt-data") if index % 2 else value for index, value in enumerate(pairs)
        ]
    errors: list[str] = []
    for field, find in finds.items():
        try:
            config = config.changed(**{field: find()})
        except HubError as error:
            errors.append(str(error))
    return config, errors


def is_model_name(value: str) -> bool:
    """Return whether `value` is not an existing path and may be OWNER/NAME of the Hub."""
    return _MODEL.fullmatch(value) is not None and not Path(value).exists()


def is_data_name(spec: str) -> bool:
    """Return whether a set of prompts is not an existing path and may be OWNER/NAME[/CONFIGURATION] of the Hub."""
    match = _DATA.fullmatch(spec)
    if match is None or Path(spec).exists():
        return False
    path = match[2] + match[3]
    return not Path(path).exists() and Path(path).suffix not in SUFFIXES


def find_model(name: str, flag: str, with_weights: bool = True, *, only_config: bool = False) -> str:
    """The folder of a model of the Hub: that of the local cache, or a download to it; HubError if neither has it.

    with_weights  False: config and tokenizer are enough
    only_config   config.json is enough
    """

    def lacks(folder: Path) -> str | None:
        names = {path.name for path in folder.iterdir()}
        if "config.json" not in names:
            return "no config.json"
        if only_config:
            return None
        if flag == "--hf-checkpoint" and not names & TOKENIZERS:
            return "no tokenizer"
        if with_weights:
            try:
                check_weight_files(folder)
            except ValueError:
                return "not all of its weights"
        return None

    patterns = _FILES if with_weights else [pattern for pattern in _FILES if pattern != "*.safetensors"]
    patterns = ["config.json"] if only_config else patterns
    return str(_snapshot(name, "model", flag, lacks, allow_patterns=patterns, ignore_patterns=["*/*"]))


def find_data(spec: str, flag: str) -> str:
    """`[NAME=]OWNER/NAME[/CONFIGURATION]:SPLIT[@[START:STOP]]` of the Hub as a set that is read from files.

    A spec that is a path stays as it is. HubError: it cannot be had, or the spec names no split of it.
    """
    match = _DATA.fullmatch(spec)
    if match is None or not is_data_name(spec):
        return spec
    set_name, repo, rest, split, rows = match.groups()
    if split is None:
        raise HubError(f"{flag} {spec}: there is no such file; of a data set of the Hub name the split, {repo}:train")

    def lacks(folder: Path) -> str | None:
        local_path = folder / rest.strip("/")
        has_split = any(name == split for _, name in find_splits(local_path))
        return None if has_split or _has_other_format(local_path) else f"not all of {repo}{rest}:{split}"

    folder = _snapshot(repo, "dataset", flag, lacks, then=f"{rest}:{split}") / rest.strip("/")
    if not find_splits(folder) and _has_other_format(folder):
        path = str(_by_datasets(folder, repo, split, f"{flag} {spec}"))
    else:
        try:
            files = choose_split(folder, split, repo + rest)
        except ValueError as error:
            raise HubError(f"{flag} {error}") from error
        parent = files[0].parent.parent if files[0].stem.isdecimal() else files[0].parent
        path = str(files[0]) if len(files) == 1 else f"{parent}:{split}"
    if flag != "--prompt-data":
        return f"{path}{rows or ''}"
    set_name = set_name or re.sub(r"[^A-Za-z0-9_-]+", "-", f"{repo.split('/')[1]}{rest}-{split}")
    return f"{set_name}={path}{rows or ''}"


def _has_other_format(folder: Path) -> bool:
    """Return whether there are rows in a format that the package `datasets` reads and fusionrl does not."""
    return folder.is_dir() and any(path.suffix in _OTHER_FORMATS for path in folder.rglob("*"))


def _by_datasets(folder: Path, repo: str, split: str, where: str) -> Path:
    """A folder of `datasets.save_to_disk` in the cache with the rows of one split, made by the package `datasets`."""
    if importlib.util.find_spec("datasets") is None:
        raise HubError(f"{where}: its files are read by the package datasets; {install_hint('datasets')}")
    from huggingface_hub.constants import HF_HOME

    parquet = Path(HF_HOME) / "fusionrl" / re.sub(r"[^\w.-]+", "--", f"{repo}/{folder}/{split}")
    if parquet.is_dir():
        return parquet
    with quiet():
        import datasets

        datasets.disable_progress_bars()
        try:
            rows = datasets.load_dataset(str(folder), split=split)
        except Exception as error:  # it runs readers of many formats, which raise anything
            raise HubError(f"{where}: the package datasets cannot read it ({_one_line(error)})") from error
        parquet.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parquet.parent) as parts:
            rows.save_to_disk(f"{parts}/rows")
            publish_folder(Path(parts, "rows"), parquet)
    return parquet


def _snapshot(
    name: str, kind: str, flag: str, lacks: Callable[[Path], str | None], then: str = "", **patterns: list[str]
) -> Path:
    """The folder of a repository's newest state that `lacks` nothing.

    kind      "model" or "dataset"
    then      what follows the folder on the command line, once a user has downloaded it
    patterns  of files, as `snapshot_download` takes them
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    download = partial(snapshot_download, name, repo_type=kind, **patterns)
    try:
        folder: Path | None = Path(download(local_files_only=True))
    except LocalEntryNotFoundError:
        folder = _partial_snapshot(name, kind)
    cached = "it is not in the local cache of the Hugging Face Hub"
    if folder is not None:
        missing = lacks(folder)
        if missing is None:
            return folder
        cached = f"the local cache has {missing}"
    why = _why_not_reached(name, kind)
    if why is None:
        print(f"downloading {name} from the Hugging Face Hub", file=sys.stderr)
        try:
            return Path(download())
        except _hub_errors() as error:
            why = f"the download failed ({_one_line(error)})"
    option = " --repo-type dataset" if kind == "dataset" else ""
    here = name.partition("/")[2]
    raise HubError(
        f"{flag} {name}: there is no such folder here, {cached}, and {why}; where there is a network:"
        f" `hf download {name}{option} --local-dir {here}`, then {flag} {here}{then}"
    )


def _partial_snapshot(name: str, kind: str) -> Path | None:
    """The cached folder of which huggingface_hub says that files are missing: those that are read may all be there."""
    from huggingface_hub import constants

    repo = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"
    try:
        folder = repo / "snapshots" / (repo / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return folder if folder.is_dir() else None


def _why_not_reached(name: str, kind: str) -> str | None:
    """Return the reason why the Hub gives nothing of a repository; None if it answers and has it."""
    answer: list[str | None] = []

    def ask() -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        try:
            HfApi().repo_info(name, repo_type=kind, timeout=ANSWER_TIMEOUT_S / 2)
            answer.append(None)
        except GatedRepoError:
            answer.append("the Hub asks for its terms to be accepted (hf auth login)")
        except RepositoryNotFoundError:
            answer.append(f"the Hub has no such {kind}, or does not show it without a login (hf auth login)")
        except _hub_errors() as error:  # offline mode, no route, a proxy's page
            answer.append(f"the Hub cannot be reached ({_one_line(error)})")

    # A thread that may be left behind: the look-up of a host's name knows no time limit.
    asking = threading.Thread(target=ask, daemon=True)
    with quiet():
        asking.start()
        asking.join(ANSWER_TIMEOUT_S)
    if answer:
        return answer[0]
    return f"the Hub does not answer within {ANSWER_TIMEOUT_S:g} s" if asking.is_alive() else "the Hub cannot be asked"


def _hub_errors() -> tuple[type[Exception], ...]:
    """Return the errors that asking the Hub may raise: of HTTP, whose library depends on huggingface_hub's version, of
    the disk, and of the library that stores chunks, which has no class of its own.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (*HfHubHTTPError.__bases__, ValueError, RuntimeError)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "…"
