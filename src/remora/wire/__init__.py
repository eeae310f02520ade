"""Values to bytes and back: pickling, tensors, frames, exceptions."""

