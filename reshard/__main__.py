"""`python -m reshard`."""

from reshard.cli.main import main

main()
