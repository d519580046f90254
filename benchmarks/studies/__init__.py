"""Studies of the papers' experiments, on simulated or published data: `jaxpfl estimate NAME` runs them."""
