"""Checkpoints that PyTorch's trainers write: metadata places every stored tensor in a larger one."""
