"""Tools for what runs leave: checkpoints, ledgers, transcripts, models."""
