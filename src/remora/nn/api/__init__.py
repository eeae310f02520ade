"""Where programs look for `remote_module`."""
