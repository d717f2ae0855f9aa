"""Quantised weights: how they are recognised, and what their codes and scales stand for."""

from reshard.quantised.decoding import Quantisation, dequantised, quantisation_of, stored_tensors
from reshard.quantised.schemes import describe, looks_quantised, recognise
