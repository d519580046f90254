"""Benchmarks, each a module with a function ``main(argv)``; ``python -m benchmarks`` lists them.

The contenders of a benchmark run in separate processes (`worker`), are timed in turn (`harness`), and are compared by
ratios of medians from the same run. jaxpfl imports only commands and studies from this package. Heavy packages are
imported only in the workers.
"""
