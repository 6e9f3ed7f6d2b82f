"""The engine of one step: order, units, update."""
