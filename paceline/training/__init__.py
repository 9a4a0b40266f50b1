"""Training: the engine that holds the model, and the roles that drive it."""
