"""How good an answer is: built-in verifiers, the built-in tasks' own scoring, and a user's function in its own process."""
