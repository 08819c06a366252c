"""What a server can learn from what clients send: attacks, as measures of risk."""
