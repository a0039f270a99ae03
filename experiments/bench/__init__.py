"""What ``kvalloc bench`` times: one module per bench, beside it the rounds that it makes."""
