"""The documentation, and in `tools` what keeps it true."""
