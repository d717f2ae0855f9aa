"""`python -m reshard`."""

from reshard.entry import main

main()
