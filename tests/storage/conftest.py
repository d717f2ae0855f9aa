"""What tests of stores start with."""

from tests.storage.places import place

__all__ = ["place"]
