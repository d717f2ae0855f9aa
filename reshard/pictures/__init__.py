"""Pictures for pages, as SVG that is legible on light and dark backgrounds.

This room depends on layouts and their ranks. It does not depend on files, the terminal or the command line; pictures
are returned as bytes.
"""
