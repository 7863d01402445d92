"""The limit of restarts within a run."""

import pytest

from fusionrl.base.wording import LOG_END
from fusionrl.observe.glossary import undocumented
from fusionrl.runtime import restarts as module
from fusionrl.runtime.buffer_handle import EvaluationLost
from fusionrl.runtime.restarts import Restarts


def test_the_limit_is_of_all_parts_within_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    restarts, error = Restarts(2), RuntimeError("the router is dead")
    assert restarts.metrics() == {}
    restarts.begin("router", error)
    now[0] = 1800.0
    restarts.begin("buffer", error)
    now[0] = 3599.0
    with pytest.raises(RuntimeError, match="the router is dead") as refused:
        restarts.begin("router", error)
    assert refused.value is error
    now[0] = 3600.0  # the first one is an hour ago
    restarts.begin("router", error)
    with pytest.raises(RuntimeError):
        restarts.begin("trainers", error)
    assert restarts.metrics() == {"run/restarts_router": 2.0, "run/restarts_buffer": 1.0}
    assert not undocumented(restarts.metrics())


def test_a_failure_that_repeats_at_the_same_step_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long each attempt takes."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    restarts = Restarts(2)

    def begin(progress: int) -> None:
        now[0] += 1801.0
        restarts.begin("trainers", RuntimeError("they hang"), progress)

    for progress in (4, 4, 5, 6, 6):
        begin(progress)
    with pytest.raises(RuntimeError, match="they hang"):
        begin(6)
    assert "started 2 times again without a step in between" in caplog.text


def test_without_restarts_a_death_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="dead"):
        Restarts(0).begin("trainers", RuntimeError("dead"))


def test_nothing_is_started_where_ray_can_start_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An actor for a node whose raylet is dead would be waited for until the end of time."""
    with pytest.raises(RuntimeError, match="the Buffer died"):
        Restarts(3, lambda: False).begin("buffer", RuntimeError("the Buffer died"))
    assert "its raylet has died, too" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError(f"it died. Its log is x; {LOG_END}a line"), KeyError()])
def test_a_warning_of_a_death_quotes_no_log(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """The log's end would come again with every message that passes the error on."""
    Restarts(3).begin("trainers", error)
    lost = str(EvaluationLost(1, error))
    first = caplog.messages[0].partition("the last hour): ")[2]
    assert lost == f"1 of its engines died: {first}"
    assert first == ("it died. Its log is x" if isinstance(error, RuntimeError) else "KeyError")
