"""General utilities, not specific to federated learning: errors, files, memory, processes, signals, the console."""
