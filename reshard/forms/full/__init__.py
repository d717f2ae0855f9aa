"""Directories of full weights: MindSpore's unified safetensors and Hugging Face's.

Every tensor is whole in one of several ``.safetensors`` files, and a map lists the file of each. The map is
checked against the files: a tensor that is missing in its file, or in two files, is an error, because
readers of the directory would disagree.

Unified weights have one more file, ``hyper_param.safetensors``: further contents of rank 0's file. Only its
scalars are read: a larger tensor may be rank 0's slice.
"""
