"""One file per axis: what it splits, what it sends, what it refuses."""
