"""The histogram study: Table 1 of Setlur et al. 2023 on users drawn or read, and users' own histograms."""

from jaxpfl.studies.histogram.study import STUDY

__all__ = ["STUDY"]
