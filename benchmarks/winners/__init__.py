"""Map of the best methods, by clients, examples, heterogeneity, participation, steps and epsilon."""
