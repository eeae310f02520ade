"""References to values on other workers. The owner counts them, so a value lives as long as a worker holds one."""
