"""Flower behind the grid's seam: messages, nodes, simulation."""
