"""The sandbox in each mode, as each user."""

from collections.abc import Iterator

import pytest

from tests.sandbox.users import CONFIGURATIONS, Sandbox


@pytest.fixture(params=CONFIGURATIONS, scope="session")
def run(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """run(code, stdin="", limit=…) -> SandboxResult."""
    sandbox = Sandbox(*request.param)
    yield sandbox
    sandbox.close()
