"""Estimation studies of ``jaxpfl estimate``, on simulated or real data, with their tables and plots."""
