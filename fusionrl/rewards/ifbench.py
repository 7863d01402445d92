"""IFBench's instructions, graded by IFBench's own program: the user's checkout of it, found on PYTHONPATH."""

import importlib
from collections.abc import Mapping
from typing import Any

from fusionrl.rewards.grader import Grader
from fusionrl.rewards.ifeval import whole_number

LIBRARY = "evaluation_lib"  # the module of the checkout that grades
MISSING = "clone https://github.com/allenai/IFBench, install its requirements, and put the folder on PYTHONPATH"


def compute_ifbench_reward(response: str, label: object, metadata: dict[str, Any] | None = None) -> float:
    """Return 1 where the response follows every instruction, as IFBench's strict program says.

    metadata  `instruction_id_list`; `kwargs`, a dict for each instruction, or one for all; `prompt_text`, `record_id`

    Raises ValueError if the metadata has no instructions, or the program is not there.
    """
    metadata = metadata or {}
    names = instructions(metadata)
    try:
        library = importlib.import_module(LIBRARY)
    except ImportError as error:
        raise ValueError(f"--rm-type ifbench: IFBench's own program is missing ({error}); {MISSING}") from error
    example = library.InputExample(
        key=int(metadata.get("record_id") or 0),
        instruction_id_list=names,
        prompt=str(metadata.get("prompt_text") or ""),
        kwargs=_arguments(metadata.get("kwargs"), len(names)),
    )
    result = library.test_instruction_following_strict(example, {example.prompt: response})
    return float(result.follow_all_instructions)


def instructions(metadata: Mapping[str, object]) -> list[str]:
    """Return the names of the instructions. Raises ValueError if there are none."""
    column = metadata.get("instruction_id_list")
    listed = column if isinstance(column, list | tuple) else ()
    names = [name.strip() for name in listed if isinstance(name, str) and name.strip()]
    if not names or any(not isinstance(name, str | None) for name in listed):
        raise ValueError(
            f"--rm-type ifbench: instruction_id_list {column!r:.80} of the metadata is not a list of names;"
            " --metadata-key names its column"
        )
    return names


def _arguments(arguments: object, count: int) -> list[dict[str, object]]:
    """Return the arguments of each instruction; a table's column has a null where an instruction has no such one.

    If the list is too short, its last item is repeated, as in slime.
    """
    each = arguments if isinstance(arguments, list | tuple) else [arguments] * count
    each = [*each[:count], *([each[-1]] if each else [{}]) * (count - len(each))]
    return [
        {name: whole_number(value) for name, value in argument.items() if value is not None}
        if isinstance(argument, Mapping)
        else {}
        for argument in each
    ]


IFBENCH = Grader(
    compute_ifbench_reward,
    lambda label, metadata: instructions(metadata),
    reads_metadata=True,
    reads_label=False,
    package=LIBRARY,
)
