"""Planning: which byte ranges of which files make which target files.

Joins layouts (what) with checkpoint files (where). It reads headers, never tensor contents, except
to compare the few small values that are copied to every rank.
"""
