"""What a record folder claims, and whether it holds."""
