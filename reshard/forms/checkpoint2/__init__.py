"""Checkpoint 2.0: the form of MindFormers since 1.8, a directory per iteration.

Each iteration has tensor files, of models and of optimizers, and a metadata.json with the layouts of tensors and
the file of every slice. Reading goes from `recognise` and `find_iterations` (names alone) to `read_checkpoint2`
(metadata and headers). Metadata is checked before it is used.
"""
