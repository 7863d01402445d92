"""Check that this machine can keep a model's programs in the sandbox, if the run executes any."""

from __future__ import annotations

from fusionrl import sandbox
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import eval_sets
from fusionrl.rewards.registry import runs_programs

AGENT = "fusionrl.rollout.agent.generate"


def uses_sandbox(config: Config) -> str | None:
    """The flag by which programs of the model are run; None: no flag says so (rows of the data may, and hooks)."""
    if config.reward.custom_rm_path is None and runs_programs(config.reward.rm_type):
        return f"--rm-type {config.reward.rm_type}"
    path = config.rollout.custom_generate_function_path
    if path is not None and path.replace(":", ".") == AGENT and config.rollout.tools_path is None:
        return f"--custom-generate-function-path {path} without --tools-path"
    try:
        sets = eval_sets(config.to_args())
    except (ValueError, TypeError):
        return None  # another check says what is wrong with the sets
    for eval_set in sets:
        if eval_set.custom_rm_path is None and runs_programs(eval_set.rm_type):
            return f"evaluation set {eval_set.name}, --rm-type {eval_set.rm_type}"
    return None


def sandbox_of_run(config: Config) -> str | None:
    """Run one program in the sandbox, if the run will run any; return the mode in words.

    Raises:
        ValueError: programs cannot be started, or only in the weak mode without --allow-weak-sandbox.
    """
    flag = uses_sandbox(config)
    if flag is None:
        return None
    sandbox.allow_weak(config.reward.allow_weak_sandbox)
    try:
        return str(sandbox.probe())
    except sandbox.SandboxError as error:
        raise ValueError(f"{flag}: {error}") from error
