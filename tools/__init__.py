"""What runs around the trainer, in folders by who uses it."""
