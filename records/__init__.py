"""Records: made, checked, compared and shown."""
