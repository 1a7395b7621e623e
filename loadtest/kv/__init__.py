"""What moving KV between nodes costs, against what the machine can do."""
