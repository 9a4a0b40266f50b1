"""Calls from the controller to a worker: a thread, a process, a group of ranks."""
