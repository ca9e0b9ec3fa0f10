"""The live page of runs: views of ``monitoring.views``, served on this machine."""
