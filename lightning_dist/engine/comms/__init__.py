"""Messages between ranks: point to point, votes and notes."""
