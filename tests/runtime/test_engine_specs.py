"""Fields of SGLang's that the run's other flags need on its engines, and groups that switch them off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.config.engine_groups import read_groups
from fusionrl.runtime.engine_specs import policy_server_args

CASES = [
    ("disable-radix-cache", {"pause_generation_mode": "in_place"}),
    ("incremental-streaming-output", {"stream_responses": True}),
]


@pytest.mark.parametrize(("switch", "flags"), CASES)
def test_a_group_cannot_switch_off_what_the_run_needs(switch: str, flags: dict[str, Any]) -> None:
    def args(group: str, **values: Any) -> dict[str, object]:
        groups = read_groups((f"g:num_gpus=1{group}",), 1)
        plan: Any = SimpleNamespace(
            group_of=lambda index: groups[0], engines_give_memory=False, device="cpu", knobs=None
        )
        return policy_server_args(Config.from_flat(values), plan, 0)

    name = switch.replace("-", "_")
    assert args("", **flags)[name] is True and args(f",{switch}=true", **flags)[name] is True
    with pytest.raises(ValueError, match=f"--engine-group g: {switch}=false: .*; leave it out"):
        args(f",{switch}=false", **flags)
    assert args(f",{switch}=false", pause_generation_mode="abort")[name] is False
