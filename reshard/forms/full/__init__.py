"""Directories of full weights: MindSpore's unified safetensors and Hugging Face's.

Every tensor is whole in one of several ``.safetensors`` files, and a map lists which. The map is
checked against the files: a tensor that is not in its file, or in two files, is an error, because
readers of the directory would not agree on it.

Unified weights have one more file, ``hyper_param.safetensors``: further contents of rank 0's file. What of
it is no scalar may be rank 0's slice of a tensor, so it is left out.
"""
