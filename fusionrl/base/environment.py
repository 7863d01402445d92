"""The secrets that a process of a run inherits, and the modes of MKL and oneDNN in it.

The shell that starts a run often holds keys: HF_TOKEN, WANDB_API_KEY, those of a cloud. A process gets the secrets in
its row of `NEEDS` and no others; other variables are inherited as usual.
"""

import os
import re
from collections.abc import Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

# By the last word of the name. TOKENS alone is mostly a count (MAX_NEW_TOKENS), PWD alone the shell's folder.
_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRETS?|CREDENTIALS?|CREDS|AUTHORIZATION|AUTH|AUTH_CONFIG|AUTH_SOCK|PASS|PAT|DSN|COOKIE"
    r"|(?:API|AUTH|ACCESS|REFRESH|BEARER|BOT)_TOKENS|CONNECTION_STRING|WEBHOOKS?(?:_URLS?)?)$"
    r"|(?:PASSWORDS?|PASSWD|PASSPHRASE|SSHPASS|_PWD)$"
    r"|(?:_|API|ACCESS|SECRET|PRIVATE)KEYS?(?:_ID)?$",
    re.IGNORECASE,
)
# Found by "://", so that a long text without a URL costs one pass. The password may hold "/", but a number before the
# first "/" is a port, and the password ends before the next "://".
_URL_WITH_PASSWORD = re.compile(r"((?<=[\w+.-])://[^/@\s:\[]*):(?!\d{1,5}/)(?:[^@\s:]|:(?!//))+@")
_QUERY = re.compile(r"(?<=[?&])([\w-]+=)([^&\s'\"]+)")  # of a URL
# A name before its value in a command line, JSON, or a header. Only the start of a word is tried: from each letter of a
# long word the search would go to its end. Likewise no more of the value is read than its beginning.
_NAMED = re.compile(r"(?<![\w-])(--[\w-]+[= ]|[\w-]+['\"]?\s*[:=])(\s*['\"]?)(?=[^\s'\",;)}\]])")
_VALUE = re.compile(r"(?:(?:bearer|basic|token|digest) )?[^\s'\",;)}\]]+", re.IGNORECASE)
_KEY = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|AKIA\w{16}|xox[abp]-[\w-]+|eyJ[\w-]{16,}\.[\w.-]+)"
)
HIDDEN = "***"
_MARKS = ("FUSIONRL_RUN_TOKEN", "FUSIONRL_TEST_TOKEN")  # they mark the processes of a run, and open nothing
_PATHS = ("RAY_TLS_SERVER_KEY",)  # it names a file, which Ray's processes read

MKL_MODE = ("MKL_CBWR", "AUTO,STRICT")
"""MKL's mode in which a row of a product has the same bits in every run and, on Intel's CPUs, whatever rows it is
computed with; without STRICT the number of rows decides. MKL reads the variable once a process."""

DETERMINISTIC_CPU = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""Without AMX a row of a bf16 product of oneDNN has the same bits whatever rows it is computed with (--bitwise). oneDNN
reads the variable once a process."""

DETERMINISTIC_GPU = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""With these NCCL, Transformer Engine and cuBLAS add up in the same order in every run (--bitwise on GPUs)."""


def deterministic_settings(device: str) -> dict[str, str]:
    """Return the variables of --bitwise."""
    return DETERMINISTIC_GPU if device == "cuda" else DETERMINISTIC_CPU


ROUTER_KEY = "FUSIONRL_ROUTER_KEY"
"""The key of the engines, for functions of the user that ask them (`plugin_api.post`)."""
ENGINE_KEY = "FUSIONRL_ENGINE_KEY"
"""The key of engines that others start, which the run's own then have, too."""
HOOK_NAMES = "FUSIONRL_HOOK_ENV"
"""The names that --hook-env gives, for the processes that run the user's functions."""

FOLDER_VARIABLE, PEERS_VARIABLE = "FUSIONRL_STORES", "FUSIONRL_STORE_PEERS"
"""The folder of the run's stores, and the nodes that may reach them (`base/group_stores.py`)."""

RAY, HOOKS, ENGINES = "ray", "hooks", "engines"
NEEDS: dict[str, frozenset[str]] = {
    "driver": frozenset({RAY, HOOKS, ENGINES}),  # the user's own shell started it: it has everything
    "ray": frozenset({RAY}),  # GCS, raylet, agents, and the actors when they start
    "buffer": frozenset({RAY, HOOKS, ENGINES}),
    "trainer": frozenset({RAY, HOOKS}),
    "engine-actor": frozenset({RAY, ENGINES}),
    "reward-worker": frozenset({HOOKS, ENGINES}),
    "engine": frozenset({ENGINES}),
    "router": frozenset({ENGINES}),
    "compiler": frozenset(),  # of the kernels for this CPU
    "checkpoint-writer": frozenset(),
    "answer-parser": frozenset(),
    "guard": frozenset(),
    "doctor": frozenset(),  # what `fusionrl doctor` imports, to see that it can
    "nursery": frozenset({RAY}),  # by standard input; its forks have the environment of their requester
    "sandbox": frozenset(),  # starts with an empty environment
}
"""Kind of process → secrets that it needs. ray: RAY_AUTH_TOKEN. hooks: what --hook-env names. engines: the run's key.

Secrets travel in messages, by standard input or as an actor's arguments, not by environment or command line; but for
RAY_AUTH_TOKEN, which Ray reads from its processes' environment.
"""


def is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable holds a secret, by its name or as it is a URL with a password."""
    if name in _MARKS or name in _PATHS:
        return False
    return name == ROUTER_KEY or bool(_NAME.search(name)) or bool(_URL_WITH_PASSWORD.search(value))


def child_environment(kind: str, source: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment with which a process of `kind` is started: this process's, less the secrets.

    Only a process with `RAY` in its row gets RAY_AUTH_TOKEN; the others are handed over, see `NEEDS`.
    """
    secrets = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} if RAY in NEEDS[kind] else set[str]()
    return {name: value for name, value in source.items() if name in secrets or not is_secret(name, value)}


@contextmanager
def without_secrets(kind: str) -> Iterator[None]:
    """Within it, this process's environment is what a process of `kind` is to inherit."""
    environment = child_environment(kind)
    hidden = {name: value for name, value in os.environ.items() if name not in environment}
    for name in hidden:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            os.environ.setdefault(name, value)


@contextmanager
def extended_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within it, this process's environment has these variables too, or instead."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def hook_secrets(names: Sequence[str], source: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that --hook-env names, for `take_secrets`. Raises ValueError if one of them is not set."""
    missing = [name for name in names if name not in source]
    if missing:
        raise ValueError(f"--hook-env {missing[0]}: the environment has no such variable; export it, or leave it out")
    return {name: source[name] for name in names}


def take_secrets(secrets: Mapping[str, str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Give a process that runs the user's functions these secrets, and no others that it may have inherited.

    In a Ray cluster that the user started, the raylet's environment reaches its actors.
    """
    environment = child_environment("ray", environ)
    for name in [name for name in environ if name not in environment]:
        environ.pop(name)
    environ.update(secrets)
    environ[HOOK_NAMES] = ",".join(secrets)


def secrets_of_hooks(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the secrets of `take_secrets` and the engines' key, for a process that runs functions."""
    names = [*filter(None, environ.get(HOOK_NAMES, "").split(",")), ROUTER_KEY]
    return {name: environ[name] for name in names if name in environ}


def not_passed_on(names: Sequence[str], source: Mapping[str, str] = os.environ) -> list[str]:
    """Secrets of the environment that no process of the run gets, as --hook-env does not name them."""
    ours = {*names, ROUTER_KEY, ENGINE_KEY, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    return sorted(name for name, value in source.items() if name not in ours and is_secret(name, value))


def hide_passwords(text: str) -> str:
    """`text` with *** for the passwords of URLs: user:***@host."""
    return _URL_WITH_PASSWORD.sub(r"\1:***@", text)


def hide_secrets(text: str, shown: Container[str] = ()) -> str:
    """`text` with *** for what has a secret's name before it (but for the names `shown`) or a key's form, and for the
    passwords of URLs."""

    def is_hidden(name: str) -> bool:
        word = name.strip("-'\"=: \t").replace("-", "_")
        return word not in shown and is_secret(word, "")

    text = _QUERY.sub(lambda found: found[1] + HIDDEN if is_hidden(found[1]) else found[0], hide_passwords(text))
    parts, end, start = list[str](), 0, 0
    while match := _NAMED.search(text, start):
        start = match.end()  # what follows a name without a secret may be another name
        if is_hidden(match[1]) and not text.startswith(HIDDEN, start) and (value := _VALUE.match(text, start)):
            parts += [text[end:start], HIDDEN]
            start = end = value.end()
    return _KEY.sub(HIDDEN, "".join([*parts, text[end:]]))
