"""NCCL's settings of a push by broadcast: trainers have those that an SGLang server ends up with."""

import ast
import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusionrl.plan.devices import CUMEM, NVLS, shared_settings

CASES = [
    ({}, {}, ("0", "0")),
    ({}, {CUMEM: "1"}, ("1", "0")),
    ({}, {CUMEM: "1", NVLS: "1"}, ("1", "1")),
    ({"enable_nccl_nvls": True}, {}, ("0", "1")),
    ({"enable_nccl_nvls": True}, {NVLS: "0"}, ("0", "1")),
    ({"enable_symm_mem": True}, {}, ("1", "1")),
    ({"enable_symm_mem": True}, {CUMEM: "0", NVLS: "0"}, ("1", "1")),
    ({"enable_symm_mem": False, "enable_kv_cache_sharding": True}, {}, ("0", "0")),
]


def server_settings(server_args: dict[str, bool], environ: dict[str, str]) -> dict[str, str]:
    """Run the statements of the installed SGLang that set NCCL's variables, in an environment of their own."""
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.origin is not None
    tree = ast.parse(Path(package.origin).parent.joinpath("srt/entrypoints/engine.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    body = next(node for node in functions if node.name == "_set_envs_and_config").body
    last = max(number for number, node in enumerate(body) if "NCCL_" in ast.unparse(node))
    on = {"nnodes": 1, "enable_memory_saver": False, "dcp_size": 1, "enable_kv_cache_sharding": False}
    config = SimpleNamespace(**on | {"enable_symm_mem": False, "enable_nccl_nvls": False} | server_args)
    envs = {"SGLANG_ENABLE_KV_SHARD_ZERO_SM_GATHER": True, "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": None}
    envs = {name: SimpleNamespace(get=lambda value=value: value) for name, value in envs.items()}
    names = {"resolving_view": lambda args: args, "is_mnnvl_fabric_device": lambda: True, "server_args": config}
    names |= {"envs": SimpleNamespace(**envs), "os": SimpleNamespace(environ=environ), "logger": logging.getLogger()}
    exec(compile(ast.Module(body[: last + 1], []), "engine.py", "exec"), names)
    return environ


@pytest.mark.parametrize(("server_args", "environ", "expected"), CASES)
def test_both_sides_agree(server_args, environ, expected):
    """A server that starts in the environment of its actor leaves the variables as the trainers have them."""
    settings = shared_settings(server_args, environ)
    assert (settings[CUMEM], settings[NVLS]) == expected
    left = server_settings(server_args, environ | settings)
    assert {name: left[name] for name in (CUMEM, NVLS)} == settings
    assert server_settings({}, {}) == {CUMEM: "0", NVLS: "0"}, "so trainers must not keep NCCL's defaults"
