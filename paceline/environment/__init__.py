"""Conversations with an environment: many turns, tools, rewards per turn, exact tokens."""
