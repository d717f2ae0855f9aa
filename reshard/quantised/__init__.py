"""Quantised weights: how they are recognised, and what their codes and scales stand for."""

from reshard.quantised.decoding import dequantised, quantisation_of, stored_tensors
from reshard.quantised.schemes import Quantisation, Quantised, describe, holds_codes, looks_quantised, recognise
