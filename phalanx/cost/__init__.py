"""What a layout costs in bytes, FLOP and seconds: formulas with their papers, no hardware."""
