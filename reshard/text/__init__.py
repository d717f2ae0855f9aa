"""Words: names of parameters and patterns of them, messages, and what is told to people."""
