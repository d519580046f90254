"""Whatever acts on an upload: compression, robust aggregation and attacks."""
