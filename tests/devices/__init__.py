"""Tests of tensors on devices that need no device: the CPU, or a device of a few lines, stands for one."""
