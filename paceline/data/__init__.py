"""Prompts: data files, chat templates, built-in tasks, and the tiny model made for them."""
