"""Schedule, gate, plan, sources and the one loop."""
