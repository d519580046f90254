"""Estimators of users' histograms over a vocabulary: clustering, fine-tuning, and their private forms."""
