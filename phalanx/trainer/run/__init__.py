"""A run on one machine or many: ranks, folder, meters."""
