"""Files of ranks, as MindSpore saves and loads them."""
