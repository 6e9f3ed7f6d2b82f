"""What the model reads, and in which order: numpy only, and the same for every layout."""
