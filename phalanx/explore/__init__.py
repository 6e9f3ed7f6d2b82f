"""The explorer: a page on which every number can be dragged. It draws values and computes none."""
