"""A whole federation from one file: planned, brought up, looked at and taken down."""
