"""Devices: those of this process, how they map from worker to worker, and the order of work on them.

Written against torch's device modules; CUDA is one case, and nothing here assumes that there is any. Importing it, or
asking what there is, starts no device.
"""
