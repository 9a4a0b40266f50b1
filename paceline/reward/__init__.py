"""Scoring of completions: built-in verifiers, task scores, reward functions and reward models."""
