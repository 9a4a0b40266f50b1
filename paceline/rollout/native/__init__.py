"""The built-in rollout engine: continuous batching on the trainer's weights or on a copy."""
