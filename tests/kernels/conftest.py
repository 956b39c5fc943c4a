"""`interpreter` runs functions where kernels are interpreted; one for the session."""

import pytest

from tests.kernels.interpreted import Interpreter


@pytest.fixture(scope="session")
def interpreter():
    made = Interpreter()
    yield made
    made.close()
