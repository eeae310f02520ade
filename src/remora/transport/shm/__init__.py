"""Memory that processes of one host share: lent with a message, used in place, given back."""
