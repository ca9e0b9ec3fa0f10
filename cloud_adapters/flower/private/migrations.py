"""Tables of the SuperLink's state, and what brings older ones up to date."""

from flwr.supercore.state.alembic.utils import (
    build_alembic_config as build_alembic_config,
    run_migrations as run_migrations,
)
