""".ckpt and .safetensors: what is in a file, where the bytes are, and how a new one is laid out."""
