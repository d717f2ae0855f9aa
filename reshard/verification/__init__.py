"""Proof of a checkpoint's contents.

To compare two checkpoints, this room has its own, naive code for the box of a tensor in each file, for the results of
naming rules, and for casts of elements. It compares bytes, block by block. Mistakes in the code that it shares with
conversions (headers, strategies, rules, choice of the step) show as refusals.
"""
