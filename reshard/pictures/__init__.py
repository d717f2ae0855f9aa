"""Pictures for pages: SVG that reads on light and on dark ones.

This room knows layouts, the ranks that hold them, and numbers. It knows nothing of files, the terminal or
the command line; what it draws is returned as bytes.
"""
