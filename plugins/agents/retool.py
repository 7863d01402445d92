"""Mathematics with a Python tool, in the manner of ReTool (arXiv 2504.11536).

--custom-generate-function-path plugins.agents.retool.generate --apply-chat-template --rm-type math_verify
--rollout-max-context-len 8192 --max-turns 8
"""

from typing import Any

from fusionrl.rollout.agent import run_agent
from fusionrl.rollout.sandbox import Limits
from fusionrl.rollout.tools import PythonTool

PYTHON = PythonTool(Limits(wall_s=10.0, cpu_s=5, memory_bytes=1 << 30, output_bytes=4 << 10))


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Turns of reasoning and of scripts; what the scripts print is read and not trained on."""
    return await run_agent(args, sample, sampling_params, [PYTHON])
