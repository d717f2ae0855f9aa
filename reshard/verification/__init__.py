"""Proof of what a checkpoint holds.

Where two checkpoints are compared, which box of a tensor each file holds, what rules of names make of it, and how
elements are cast is worked out here, naively, and bytes are compared block by block. What is shared with conversions
can only refuse: the reading of headers, strategies and rules, and the choice of the step.
"""
