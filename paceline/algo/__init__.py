"""Reinforcement-learning algorithms: settings, advantages and losses, as pure functions."""
