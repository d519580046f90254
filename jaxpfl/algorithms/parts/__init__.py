"""Building blocks of federated methods: local work, optimizers, servers and parts of a model's tree."""
