"""Generated from node.proto by `make proto`; never edited."""
