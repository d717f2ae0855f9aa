"""Distributed checkpoints of PyTorch: torch DCP, as FSDP2 and Megatron write them, and hyper-parallel's form.

Metadata is a pickle, ``.metadata``, or one for each rank. It lists every tensor with its chunks, and for each chunk
the file and the record that holds it. It is read as data: no class of it is imported and nothing of it is run.
"""
