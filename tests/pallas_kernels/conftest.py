"""Runs every test that takes `implementation` on every form of the op."""

import pytest


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> str:
    """Name of the form under test."""
    return request.param
