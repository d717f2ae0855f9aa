"""Directories of full weights: MindSpore's unified safetensors and Hugging Face's."""
