"""Which worker runs on which device: planned, checked, and started locally or on Ray."""
