"""Estimators of users' histograms over a vocabulary: clustering, fine-tuning, and private variants of both."""
