"""The oracle: proves a layout equal to one device."""
