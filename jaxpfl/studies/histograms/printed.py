"""Printed values of Setlur et al. 2023, Table 1."""

from __future__ import annotations

PRINTED = {
    "Local": (5.093, 5.093), "FedAvg": (1.054, 1.115), "IFCA": (1.036, 1.110), "Algorithm 2 + DimRed": (0.971, 0.990),
    "Algorithm 2": (0.930, 1.053), "FedAvg + FT": (0.912, 0.958), "IFCA + FT": (0.875, 0.948),
    "Algorithm 2 + DimRed + FT": (0.883, 0.904), "Algorithm 2 + FT": (0.868, 0.951),
}  # fmt: skip
"""The paper's losses, without and with privacy (eps 15, delta 1e-10), on Reddit."""
