"""Supervised fine-tuning: settings, run, results and display of `paceline sft`."""
