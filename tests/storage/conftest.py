"""What tests of stores start with."""

from tests.storage.places import place, toy

__all__ = ["place", "toy"]
