"""The package in which programs look for `remote_module`."""
