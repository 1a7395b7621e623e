"""What it costs that a node is not there: off until it is needed, or killed."""
