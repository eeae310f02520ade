"""Memory that goes with a message without being copied into it: shared between processes, or on a device."""
