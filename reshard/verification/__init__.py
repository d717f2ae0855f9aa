"""Proof of a checkpoint's contents.

To compare two checkpoints, this room computes on its own, naively: the box of a tensor that each file holds, the
tensors that rules of names make, and the casts of elements. It compares bytes, block by block. Code
shared with conversions can only refuse: the reading of headers, strategies and rules, and the choice of the step.
"""
