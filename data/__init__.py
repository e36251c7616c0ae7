"""Text to datasets: made here, or fetched."""
