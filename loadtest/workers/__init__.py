"""What Workers cost: beside a direct call, when they are cold, and when one of them loops."""
