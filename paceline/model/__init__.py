"""Models: loading, shapes, weight layouts, packing, attention: what engine and trainer share."""
