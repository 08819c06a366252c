"""The engine on Flower: the same loop and the same client runtime, with messages in between."""
