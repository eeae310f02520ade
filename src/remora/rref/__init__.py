"""References to values that live on other workers, counted so that each value lives as long as somebody needs it."""
