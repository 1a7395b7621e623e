"""The tiers of a node's pools: what is kept of their blocks, and what is brought back."""
