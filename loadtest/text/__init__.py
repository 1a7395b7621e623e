"""What a schema costs: answers of the same length with one and without, side by side."""
