"""What a directory that is written holds, by its form: which files, which tensors in each, what finishes it.

Pure functions of names and sizes; nothing here reads or writes.
"""
