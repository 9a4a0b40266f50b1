"""Weight transports, each with its source in the trainer and its target in the engine."""
