"""Estimation studies of ``jaxpfl estimate``, simulated or on data, with their tables and plots."""
