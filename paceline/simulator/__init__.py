"""Simulation of runs: the real loop in virtual time, with simulated engines and trainers."""
