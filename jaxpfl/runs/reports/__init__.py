"""Reports about run, sweep and study folders: HTML pages, a list of folders, and the comparison of two runs."""
