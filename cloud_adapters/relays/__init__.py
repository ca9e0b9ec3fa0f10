"""The line inside a cloud: sites ask their relay for questions, over HTTPS."""
