"""What developers use."""
