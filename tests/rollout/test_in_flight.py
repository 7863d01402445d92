"""Samples that are under way, in words, for a person who looks at a run that stands still. The clock is fake."""

import pytest

from fusionrl.data.sample import Sample
from fusionrl.rollout.generate_state import GENERATED, SCORED, SamplesInFlight


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _sample(index: int | None, length: int = 0) -> Sample:
    return Sample(index=index, prompt="p", tokens=[1] * (length + 1), response_length=length)


def test_the_oldest_of_each_stage_is_named() -> None:
    clock = Clock()
    in_flight = SamplesInFlight(clock)
    assert in_flight.describe() == ""
    with in_flight.note(GENERATED, _sample(3)):
        clock.now = 20.0
        with in_flight.note(GENERATED, _sample(7)), in_flight.note(SCORED, _sample(None)):
            clock.now = 60.0
            assert in_flight.describe() == (
                "2 samples are being generated (sample 3 for 60 s), 1 sample is being scored (one for 40 s);"
                " 0 are finished since the start, with 0 tokens"
            )
        in_flight.scored(_sample(7, 5))
        with pytest.raises(KeyError), in_flight.note(SCORED, _sample(1)):
            raise KeyError
        assert in_flight.describe() == (
            "1 sample is being generated (sample 3 for 60 s); 1 are finished since the start, with 5 tokens"
        )
    assert in_flight.describe() == ""
