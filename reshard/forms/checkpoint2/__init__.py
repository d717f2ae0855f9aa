"""Checkpoint 2.0: the form of MindFormers since 1.8, a directory per iteration.

Each iteration has files of tensors, of models and of optimizers, and a metadata.json that records how tensors
are cut and which file holds which slice. Reading goes from `recognise` and `find_iterations` (names alone) to
`read_checkpoint2` (metadata and headers). Metadata is checked before it is used.
"""
