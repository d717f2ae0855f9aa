"""The page of `reshard view`."""
