"""PyTorch's sharded safetensors: files of chunks, whose headers record where these begin.

``HuggingFaceStorageWriter`` of torch.distributed.checkpoint writes one file for each rank, or several, and no index.
``DCP_SHARDING_INFO`` in a header has the offsets of every tensor of the file. Newer versions also record the shape of
the full tensor; without it, a tensor whose last rows no file holds looks like a smaller one.
"""
