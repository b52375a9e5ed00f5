"""What the engine takes in time and memory."""
