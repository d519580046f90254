"""The histogram study: Table 1 of Setlur et al. 2023 for synthetic or real users, and users' own histograms."""

from .study import STUDY

__all__ = ["STUDY"]
