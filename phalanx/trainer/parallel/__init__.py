"""One file per axis: how it is applied. Its twin in cost/axes says what it sends."""
