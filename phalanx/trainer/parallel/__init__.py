"""One file per axis: how it is applied. Its twin in cost/messages says what it sends."""
