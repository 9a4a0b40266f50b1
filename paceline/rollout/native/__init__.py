"""Our own rollout engine: continuous batching over slots, on the trainer's weights or on a copy of them."""
