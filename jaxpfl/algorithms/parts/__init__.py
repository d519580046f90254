"""Building blocks of federated methods: local work, optimizers, servers, and models that are split into parts."""
