"""Entry point of ``python -m jaxpfl.cli``."""

from jaxpfl.cli import main

main()
