"""The model that is trained: a decoder in slices."""
