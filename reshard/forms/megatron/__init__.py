"""Megatron-Core's checkpoints: ``torch_dist`` directories and legacy trees of ``.pt`` files."""
