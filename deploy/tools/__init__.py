"""Work on what runs have left: checkpoints, ledgers, transcripts, models."""
