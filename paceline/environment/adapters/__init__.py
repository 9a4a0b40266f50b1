"""Environments of other libraries. Each adapter is the only module that imports its library."""
