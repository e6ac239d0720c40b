"""Studies of our own questions, with protocols that are committed before they run."""
