"""Map of the methods that win, by clients, examples, heterogeneity, participation, steps and epsilon."""
