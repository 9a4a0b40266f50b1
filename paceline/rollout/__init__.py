"""Generation: engines, the fleet that replaces them, the rollouter that drives them."""
