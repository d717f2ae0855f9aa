"""Names of parameters, patterns of names, and messages."""
