"""Environments of other libraries, with their real packages."""
