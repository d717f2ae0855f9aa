"""Quantised weights: how they are recognised, and what their codes and scales stand for."""
