"""Benchmarks: opt-in, each a module with ``main(argv)``; ``python -m benchmarks`` lists them.

What a module measures runs in processes of its own (`worker`), timed in turn (`harness`) and compared by ratios of
medians of the same run. Nothing here is imported by jaxpfl, and nothing heavy is imported before a worker starts.
"""
