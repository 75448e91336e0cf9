"""Agent loops and environments."""
