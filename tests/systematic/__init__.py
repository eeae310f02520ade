"""Whole classes of faults, tried systematically: something happens at every moment of some work, one after the other."""
