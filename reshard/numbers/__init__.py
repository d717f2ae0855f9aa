"""What numbers a checkpoint holds: statistics of tensors, and how two checkpoints differ.

Tensors are read whole, whatever they are cut into, every element once, and computed with block by block while
they are in the cache of a core. What comes out does not depend on layouts, threads or memory.
"""
