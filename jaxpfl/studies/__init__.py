"""Estimation studies: what ``jaxpfl estimate`` runs, simulated or on data, with their tables and plots."""
