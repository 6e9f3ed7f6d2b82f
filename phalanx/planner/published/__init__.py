"""Published runs: their columns, what is predicted for them, and how right it is."""
