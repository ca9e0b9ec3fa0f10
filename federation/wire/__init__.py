"""The wire format between the parties."""
