"""The numbers in checkpoints: statistics of tensors, and differences of two checkpoints.

Every element of the full tensors is read once, and computed with in blocks that stay in the cache of a core. Results
do not depend on layouts, threads or memory.
"""
