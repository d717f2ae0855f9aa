""".ckpt and .safetensors: contents of a file, places of bytes, and layout of new files."""
