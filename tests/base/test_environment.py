"""Which secrets a process inherits: the table, the names, and processes that are really started."""

import collections
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusionrl.base import environment as env
from fusionrl.base.environment import NEEDS, ROUTER_KEY, child_environment, hide_passwords, is_secret
from fusionrl.runtime.early_start import nursery_environment
from tests.clock import here_s
from tests.own_process import run_code

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "security.md"
SECRETS = """
    HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN VAULT_TOKEN
    GOOGLE_APPLICATION_CREDENTIALS AZURE_STORAGE_CONNECTION_STRING MLFLOW_TRACKING_PASSWORD AZURE_CLIENT_SECRET
    SSH_AUTH_SOCK APIKEY RAY_AUTH_TOKEN FUSIONRL_ROUTER_KEY OPENAI_KEY PGPASSWORD MYSQL_PWD SSHPASS REDISCLI_AUTH
    GITHUB_PAT COS_SECRETKEY OPENAI_API_KEYS API_TOKENS SLACK_WEBHOOK_URL DOCKER_AUTH_CONFIG npm_config__auth SENTRY_DSN
    MINIO_ACCESSKEY
"""
NONE = """
    PATH HOME TOKENIZERS_PARALLELISM SGLANG_CLIP_MAX_NEW_TOKENS SGLANG_INIT_NEW_TOKEN_RATIO PYTHONPATH OMP_NUM_THREADS
    FUSIONRL_RUN_TOKEN NCCL_SOCKET_IFNAME AWS_REGION HF_HOME KEYBOARD
    PWD OLDPWD KEYBOARD_LAYOUT XKB_KEYBOARD MONKEY RAY_TLS_SERVER_KEY RAY_AUTH_MODE MAX_TOKENS NCCL_BYPASS COMPASS
    LD_LIBRARY_PATH XAUTHORITY DBUS_SESSION_BUS_ADDRESS RAY_ADDRESS VIRTUAL_ENV GIT_AUTHOR_NAME SGLANG_KEYFRAMES
"""


def test_secrets_by_name() -> None:
    assert [name for name in SECRETS.split() if not is_secret(name, "x")] == []
    assert [name for name in NONE.split() if is_secret(name, "x")] == []


def test_a_url_with_a_password_is_one() -> None:
    assert is_secret("HTTPS_PROXY", "http://me:hunter2@proxy:3128")
    for address in ("http://proxy:3128/a:b@c", "http://[::1]:3128/a:b@c"):
        assert not is_secret("HTTPS_PROXY", address)
    assert hide_passwords("x http://me:hunter2@proxy:3128/p?q y") == "x http://me:***@proxy:3128/p?q y"
    assert hide_passwords("redis://:hun/ter:2@host/0") == "redis://:***@host/0"
    assert hide_passwords("http://me:a@h/x,http://you:b@h/y") == "http://me:***@h/x,http://you:***@h/y"


@pytest.mark.parametrize("piece", ["a", "a:", "a://", "a://b:", "a://b:c/", "://:"])
def test_a_long_text_costs_one_pass(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    start = time.perf_counter()
    assert hide_passwords(text) == text
    assert time.perf_counter() - start < here_s(1)


def test_the_table_is_that_of_the_documentation() -> None:
    section = DOCS.read_text().split("## Keys")[1].split("## ")[0]
    rows = dict(re.findall(r"^\| ([a-z-]+) \| ([a-z, ]+) \|$", section, re.MULTILINE))
    rows.pop("process")
    assert rows == {kind: ", ".join(sorted(needs)) or "none" for kind, needs in NEEDS.items()}


def test_children_get_what_their_row_says() -> None:
    shell = {"PATH": "/bin", "HF_TOKEN": "a", "RAY_AUTH_TOKEN": "b", ROUTER_KEY: "c", "FUSIONRL_RUN_TOKEN": "d"}
    assert child_environment("ray", shell) == {"PATH": "/bin", "RAY_AUTH_TOKEN": "b", "FUSIONRL_RUN_TOKEN": "d"}
    for kind in ("engine", "router", "reward-worker", "checkpoint-writer", "answer-parser", "guard"):
        assert child_environment(kind, shell) == {"PATH": "/bin", "FUSIONRL_RUN_TOKEN": "d"}


def test_hooks_get_what_is_named_and_an_actor_nothing_else() -> None:
    shell = {"HF_TOKEN": "a", "JUDGE_API_KEY": "j", "PATH": "/bin"}
    assert env.hook_secrets(["JUDGE_API_KEY"], shell) == {"JUDGE_API_KEY": "j"}
    assert env.not_passed_on(["JUDGE_API_KEY"], shell) == ["HF_TOKEN"]
    with pytest.raises(ValueError, match="--hook-env OTHER_KEY"):
        env.hook_secrets(["OTHER_KEY"], shell)
    actor = {"PATH": "/bin", "WANDB_API_KEY": "of the cluster", "RAY_AUTH_TOKEN": "t"}
    env.take_secrets({"JUDGE_API_KEY": "j"}, actor)
    assert "WANDB_API_KEY" not in actor and actor["JUDGE_API_KEY"] == "j" and actor["RAY_AUTH_TOKEN"] == "t"
    actor[ROUTER_KEY] = "k"
    assert env.secrets_of_hooks(actor) == {"JUDGE_API_KEY": "j", ROUTER_KEY: "k"}


def test_what_is_hidden_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a")
    program = [sys.executable, "-c", "import os; print('HF_TOKEN' in os.environ)"]
    with env.without_secrets("ray"):
        assert subprocess.run(program, capture_output=True, text=True).stdout == "False\n"
    assert os.environ["HF_TOKEN"] == "a"


def test_no_child_is_started_with_everything() -> None:
    """Whoever starts a process says its environment; the exceptions print what a GPU is, or start the same program."""
    root = Path(__file__).parents[2]
    allowed = {"fusionrl/cli/device.py": 1, "fusionrl/cli/supervise.py": 1}  # nvidia-smi -L; the driver again
    found = collections.Counter(
        str(path.relative_to(root))
        for path in (root / "fusionrl").rglob("*.py")
        for call in re.findall(r"subprocess\.(?:Popen|run)\((?=(.{,600}))", path.read_text(), re.DOTALL)
        if not re.search(r"\benv=", call) and path.name != "process_minder.py"  # it hands on what it was started with
    )
    assert found == allowed


_ROWS = """
import sys
import torch
random = torch.Generator().manual_seed(0)
torch.set_num_threads(1)
unlike = []
for size in (64, 192, 576):
    rows, weight = (torch.randn(n, size, generator=random) for n in (64, 3 * size))
    whole = rows @ weight.T
    unlike += [(n, size) for n in map(int, sys.argv[1:]) if not torch.equal(rows[:n] @ weight.T, whole[:n])]
print(unlike)
"""


def test_a_row_of_a_product_does_not_depend_on_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs of a token are the same bits in every micro-batch. On AMD CPUs fewer than 4 rows differ."""
    monkeypatch.delenv(env.MKL_MODE[0], raising=False)
    environment = nursery_environment()
    assert environment[env.MKL_MODE[0]].endswith(",STRICT"), "which products show on Intel's CPUs alone"
    few = ["1", "2", "3"] if "GenuineIntel" in Path("/proc/cpuinfo").read_text() else []
    assert run_code(_ROWS, *few, "4", "7", "17", **environment).strip() == "[]"
