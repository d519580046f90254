"""Reports: pages about run, sweep and study folders, their list, and the difference of two runs."""
