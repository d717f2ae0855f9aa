"""Fixtures for tests of stores."""

from tests.storage.places import place, toy

__all__ = ["place", "toy"]
