"""The real model of the smoke tests."""

from tests.smoke.conftest import smollm2

__all__ = ["smollm2"]
