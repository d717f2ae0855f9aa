"""Pictures for pages: SVG that reads on light and on dark ones.

This room knows layouts and numbers. It knows nothing of files, the terminal or the command line;
what it draws is returned as bytes.
"""

from reshard.pictures.transfers import transfer_map

__all__ = ["transfer_map"]
