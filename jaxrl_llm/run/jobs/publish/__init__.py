"""What goes out with an exported model: its card, and the upload to a hub if the user asks."""
