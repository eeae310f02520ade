"""The other workers: how each is found, connected, watched and given up."""
