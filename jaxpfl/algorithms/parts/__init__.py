"""Parts that federated methods share: local work, optimizers, servers, and the trees of a model that they deal with."""
