"""A tiny policy learns to copy digits: GRPO through the whole pipeline, on two CPU cores, in minutes."""
