"""An evaluation has tokens of one version of the weights."""

from __future__ import annotations

from typing import Any

import pytest

from fusionrl.buffer.evaluation import MixedVersions, check_one_version
from fusionrl.data.sample import Sample


def result(*versions: Any) -> Any:
    samples = [
        Sample(index=i, tokens=[1] * (1 + len(known or [])), response_length=len(known or []), weight_versions=known)
        for i, known in enumerate(versions)
    ]
    return {"rewards": [0.0] * len(versions), "samples": samples}


@pytest.mark.parametrize(
    ("versions", "pushed", "found"),
    [
        ([[3, -1], None], 3, 3),  # nobody said which weights sampled the others
        ([["3", "3"]], 3, 3),  # a text for each turn, as slime's functions append them
        ([[2, 2]], None, 2),
        ([["default"]], None, 0),
        ([None], None, None),
        ([], 4, 4),
    ],
)
def test_the_one_version(versions: list[Any], pushed: int | None, found: int | None) -> None:
    assert check_one_version({"aime": result(*versions)}, pushed, 7) == found


@pytest.mark.parametrize(
    ("data", "pushed", "said"),
    [
        ({"a": result([3, 3], [3, 4])}, 3, "engines were pushed version 3, and sample 1 of set a .* version 4"),
        ({"a": result([5]), "b": result([5], ["6"])}, None, "sample 0 of set a .* 5, and sample 1 of set b .* 6"),
        ({"a": result([5, 6])}, None, "after step 7 would mix two versions of the weights: .* version 5, and .* 6"),
    ],
)
def test_a_result_of_two_versions_is_an_error_that_names_both(data: Any, pushed: int | None, said: str) -> None:
    with pytest.raises(MixedVersions, match=said):
        check_one_version(data, pushed, 7)
