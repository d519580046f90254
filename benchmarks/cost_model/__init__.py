"""Cost of a round before it runs: operations and bytes of the traced program, and seconds on a machine."""
