"""How a message travels: frames, references to a store, redelivery."""
