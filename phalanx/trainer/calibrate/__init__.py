"""What a machine does, measured by what the trainer does on it: all ranks at the same moment."""
