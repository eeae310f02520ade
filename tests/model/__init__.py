"""Models of protocols, walked exhaustively and at random."""
