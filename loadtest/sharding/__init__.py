"""What splitting a model over processes costs: `python -m loadtest.sharding`."""
