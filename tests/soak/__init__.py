"""A soak test: random tasks under random abuse, checked against a model. Run it with `make soak`."""
