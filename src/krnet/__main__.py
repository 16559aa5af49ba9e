"""python -m krnet, where the command `krnet` is not on the PATH."""

from krnet.cli.app import main

main()
