"""Forms of checkpoints: what each is, how it is recognised, read, written and described; a folder per form."""
