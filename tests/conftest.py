"""Hypothesis measures its examples by default; how fast they are is for benchmarks to say."""

from contextlib import suppress

with suppress(ImportError):  # not in vLLM's environment, whose tests use none
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
