"""Clients beyond device memory: data and states in host memory or files, the cohort's rows travelling ahead."""
