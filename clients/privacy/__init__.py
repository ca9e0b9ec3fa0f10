"""What a site promises, spends and refuses; all of it is under the code hash."""
