"""Checkpoint 2.0 of MindFormers."""
