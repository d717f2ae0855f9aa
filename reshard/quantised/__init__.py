"""Quantised weights: how they are recognised, and what their codes and scales stand for."""

from reshard.quantised.decoding import Quantisation, dequantised, quantisation_of, stored_tensors
from reshard.quantised.schemes import describe, looks_quantised, recognise

__all__ = [
    "Quantisation",
    "dequantised",
    "describe",
    "looks_quantised",
    "quantisation_of",
    "recognise",
    "stored_tensors",
]
