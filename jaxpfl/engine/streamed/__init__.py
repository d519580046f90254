"""Training with clients that exceed device memory: their data and states are in host memory or in files."""
