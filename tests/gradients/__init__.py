"""Any program yields the same gradients on many workers as in one process."""
