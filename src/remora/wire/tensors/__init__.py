"""Tensors as bytes: reducers for the pickler, the storages behind them, layouts other than strided."""
