"""Environments that are part of Paceline."""
