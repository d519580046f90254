"""Nothing of the field: errors, files, memory, processes, signals and the console."""
