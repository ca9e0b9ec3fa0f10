"""Simulations that draw no report: most tests look at something else."""

from functools import partial

from deploy.wiring import simulation

simulate = partial(simulation.simulate, report=False)
