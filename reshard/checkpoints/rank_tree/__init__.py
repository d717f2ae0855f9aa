"""Trees of rank directories: which rank has a file of which step, by names alone."""
