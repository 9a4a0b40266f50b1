"""OpenAI-compatible endpoint in front of the engines: a program that uses it is an environment."""
