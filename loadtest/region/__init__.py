"""What a region's router does for its requests, measured from outside: `make bench-region`."""
